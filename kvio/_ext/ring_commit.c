// SPDX-License-Identifier: Apache-2.0
/*
 * Commits: device operations that runs wait for and share. A header page to be written, a header
 * page to be read again (verify=never), an fdatasync. Of each there is at most one in flight, and
 * it begins after all that share it have joined: two racing O_DIRECT writes of one page may land
 * in either order, and a read proves nothing about a payload that comes after it.
 *
 * The gate: a commit is not sent for the first run that needs it while other runs of the same
 * batch are still on their way there, since the batch ends no sooner for it. So a batch costs one
 * operation a page, and one fdatasync a step. Gates open at GATE_BYTES or GATE_RUNS at the latest,
 * and at once for paced runs, whose reports are due one by one.
 */
#include "ring_internal.h"

#define GATE_BYTES (64u << 20)
#define GATE_RUNS 512u

static void commit_ends(struct kvio_ring *ring, struct commit *commit, int res,
			const uint8_t *page);

static void commit_gate(struct kvio_ring *ring, struct commit *commit)
{
	commit->gated = true;
	commit->next = ring->gated;
	ring->gated = commit;
}

/* Sends the commit with everything that waits for it. */
static void commit_fly(struct kvio_ring *ring, struct commit *commit)
{
	bool sync = commit->op == IO_SYNC;
	struct io *io = io_new(ring);
	void *page = sync ? NULL : page_get(ring);

	for (struct run *run = commit->waiting; run; run = run->next) {
		ring->gated_bytes -= run_nbytes(ring, run);
		ring->gated_runs--;
		run->batch->moving++;
	}
	commit->flying = commit->waiting;
	commit->waiting = NULL;
	commit->in_flight = true;
	if (!io || (!sync && !page)) {
		free(io);
		page_put(ring, page);
		commit_ends(ring, commit, -ENOMEM, NULL);
		return;
	}
	io->commit = commit;
	io->segment = commit->segment;
	io->buffer = -1;
	io->op = commit->op;
	if (!sync) {
		io->addr = page;
		io->nbytes = KVIO_PAGE;
		io->offset = (KVIO_FIRST_HEADER_PAGE + (uint64_t)commit->page) * KVIO_PAGE;
	}
	/* A copy: the image may change while the device reads the page. */
	if (io->op == IO_WRITE)
		memcpy(page, commit->segment->headers + (size_t)commit->page * KVIO_PAGE,
		       KVIO_PAGE);
	io_start(ring, io);
}

/* Is there a run that gains nothing by waiting for others? */
static bool may_fly(const struct commit *commit)
{
	for (const struct run *run = commit->waiting; run; run = run->next)
		if (run->end_ns || run->batch->moving == 0)
			return true;
	return false;
}

/* Opens the gates that have no reason left to be closed. All are looked at before any opens: what
 * flies is on its way again, and others of its batch would wait for it. */
void commits_launch(struct kvio_ring *ring)
{
	bool all = ring->gated_bytes >= GATE_BYTES || ring->gated_runs >= GATE_RUNS;
	struct commit *commit = ring->gated, *next, *open = NULL;

	ring->gates_due = false;
	ring->gated = NULL;
	for (; commit; commit = next) {
		next = commit->next;
		if (all || may_fly(commit)) {
			commit->next = open;
			open = commit;
		} else {
			commit_gate(ring, commit);
		}
	}
	for (; open; open = next) {
		next = open->next;
		open->gated = false;
		commit_fly(ring, open);
	}
}

void commit_join(struct kvio_ring *ring, struct run *run, struct commit *commit, enum step step)
{
	run->step = step;
	run->next = commit->waiting;
	commit->waiting = run;
	ring->gated_bytes += run_nbytes(ring, run);
	ring->gated_runs++;
	if (!commit->in_flight && !commit->gated)
		commit_gate(ring, commit);
	batch_less(ring, run->batch);
	ring->gates_due |= run->end_ns || ring->gated_bytes >= GATE_BYTES ||
			   ring->gated_runs >= GATE_RUNS;
}

static uint32_t chain_of(const struct kvio_segment *segment, uint32_t page)
{
	return (segment->index * 31 + page) % CHECK_CHAINS;
}

/* The read of this header page that runs may join now; NULL: no memory. */
struct commit *commit_check(struct kvio_ring *ring, struct kvio_segment *segment, uint32_t page)
{
	struct commit **chain = &ring->checks[chain_of(segment, page)], *commit;

	for (commit = *chain; commit; commit = commit->chained)
		if (commit->segment == segment && commit->page == page)
			return commit;
	commit = ring->spare_commits;
	if (commit)
		ring->spare_commits = commit->next;
	else
		commit = malloc(sizeof(*commit));
	if (!commit)
		return NULL;
	*commit = (struct commit){ .segment = segment, .page = page, .op = IO_READ,
				   .chained = *chain };
	*chain = commit;
	return commit;
}

static void check_retire(struct kvio_ring *ring, struct commit *commit)
{
	struct commit **at = &ring->checks[chain_of(commit->segment, commit->page)];

	while (*at != commit)
		at = &(*at)->chained;
	*at = commit->chained;
	commit->next = ring->spare_commits;
	ring->spare_commits = commit;
}

void commits_free(struct kvio_ring *ring)
{
	while (ring->spare_commits) {
		struct commit *commit = ring->spare_commits;

		ring->spare_commits = commit->next;
		free(commit);
	}
}

/* Runs that failed take their headers out of the image before the page may be written again. */
static void commit_ends(struct kvio_ring *ring, struct commit *commit, int res,
			const uint8_t *page)
{
	struct run *run = commit->flying, *next;

	commit->flying = NULL;
	for (; run; run = next) {
		next = run->next;
		run->error = res;
		if (commit->op != IO_READ)
			write_advance(ring, run);
		else if (res)
			read_advance(ring, run);
		else
			read_checked(ring, run, page);
	}
	commit->in_flight = false;
	if (commit->waiting) {
		commit_gate(ring, commit);
		ring->gates_due = true;
	} else if (commit->op == IO_READ) {
		check_retire(ring, commit);
	}
}

void commit_done(struct kvio_ring *ring, struct io *io, int res)
{
	struct commit *commit = io->commit;
	struct kvio_segment *segment = io->segment;

	if (io->op == IO_SYNC) {
		stats_add(&ring->stats.syncs, 1);
	} else if (io->op == IO_READ) {
		stats_add(&ring->stats.check_reads, 1);
	} else {
		stats_add(&ring->stats.header_writes, 1);
		if (res == 0)
			segment_page_changed(ring->store, segment, commit->page);
	}
	commit_ends(ring, commit, res, io->addr);
	page_put(ring, io->op == IO_SYNC ? NULL : io->addr);
}
