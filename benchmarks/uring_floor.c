// SPDX-License-Identifier: Apache-2.0
/*
 * What the kernel gives to C that does nothing else: random reads or writes of a file through
 * liburing (fixed buffers and files, the best set-up flags there are) or through threads of pread.
 *
 *     cc -O2 -o uring_floor benchmarks/uring_floor.c -luring -pthread
 *     ./uring_floor FILE read BLOCK_BYTES COUNT DEPTH [AT] [SPAN] [SEED] [direct|buffered|tmpfs]
 *
 * `read`, `write`: liburing. `pread`: DEPTH threads. `first`: latency of one block at a time by
 * pread. COUNT blocks of the SPAN blocks that begin at byte AT of the file are moved, in random
 * order. One line of JSON: bytes, wall seconds, CPU seconds of the process. Memory is in huge
 * pages, as that of kvio's pools, unless KVIO_FLOOR_SMALL_PAGES is set.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define HUGE (2ul << 20)

static int fd;
static char *memory;
static unsigned long block, count, depth, at, span;
static unsigned long *order;
static _Atomic unsigned long taken;

static void fail(const char *what, int code)
{
	fprintf(stderr, "%s: %s\n", what, strerror(code < 0 ? -code : code));
	exit(1);
}

static double seconds(int clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void shuffle(unsigned seed)
{
	order = malloc(count * sizeof(*order));
	for (unsigned long i = 0; i < count; i++)
		order[i] = i % span;
	srandom(seed);
	for (unsigned long i = count; i > 1; i--) {
		unsigned long j = (unsigned long)random() % i, was = order[i - 1];

		order[i - 1] = order[j];
		order[j] = was;
	}
}

static void setup(struct io_uring *ring)
{
	struct iovec iov = { memory, block * depth };
	int rc = io_uring_queue_init((unsigned)depth * 2, ring,
				     IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);

	if (rc < 0)
		rc = io_uring_queue_init((unsigned)depth * 2, ring, 0);
	if (rc == 0)
		rc = io_uring_register_files(ring, &fd, 1);
	if (rc == 0)
		rc = io_uring_register_buffers(ring, &iov, 1);
	if (rc < 0)
		fail("io_uring", rc);
}

static void put(struct io_uring *ring, int write, unsigned long slot, unsigned long which)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
	char *to = memory + slot * block;
	unsigned long offset = at + order[which] * block;

	if (write)
		io_uring_prep_write_fixed(sqe, 0, to, (unsigned)block, offset, 0);
	else
		io_uring_prep_read_fixed(sqe, 0, to, (unsigned)block, offset, 0);
	sqe->flags |= IOSQE_FIXED_FILE;
	io_uring_sqe_set_data64(sqe, slot);
}

static void run_uring(struct io_uring *ring, int write)
{
	unsigned long next = 0, done = 0;

	while (next < depth && next < count) {
		put(ring, write, next, next);
		next++;
	}
	while (done < count) {
		struct io_uring_cqe *cqes[64];
		unsigned got;

		io_uring_submit_and_wait(ring, 1);
		got = io_uring_peek_batch_cqe(ring, cqes, 64);
		for (unsigned i = 0; i < got; i++) {
			unsigned long slot = cqes[i]->user_data;

			if (cqes[i]->res != (int)block)
				fail("short or failed", cqes[i]->res);
			done++;
			if (next < count)
				put(ring, write, slot, next++);
		}
		io_uring_cq_advance(ring, got);
	}
}

static void *run_pread(void *arg)
{
	char *to = memory + (size_t)arg * block;
	unsigned long i;

	while ((i = taken++) < count)
		if (pread(fd, to, block, (off_t)(at + order[i] * block)) != (ssize_t)block)
			fail("pread", errno);
	return NULL;
}

static void run_threads(void)
{
	pthread_t threads[64];

	for (unsigned long i = 0; i < depth; i++)
		pthread_create(&threads[i], NULL, run_pread, (void *)i);
	for (unsigned long i = 0; i < depth; i++)
		pthread_join(threads[i], NULL);
}

static unsigned long number(int argc, char **argv, int i, unsigned long otherwise)
{
	return i < argc ? strtoul(argv[i], NULL, 0) : otherwise;
}

int main(int argc, char **argv)
{
	int write, uring, direct = O_DIRECT;
	struct io_uring ring;
	double wall, cpu;

	if (argc < 6) {
		fprintf(stderr, "see the head of uring_floor.c\n");
		return 2;
	}
	write = !strcmp(argv[2], "write");
	uring = write || !strcmp(argv[2], "read");
	block = number(argc, argv, 3, 0);
	count = number(argc, argv, 4, 0);
	depth = number(argc, argv, 5, 0);
	at = number(argc, argv, 6, 0);
	span = number(argc, argv, 7, count);
	if (argc > 9 && strcmp(argv[9], "direct"))
		direct = 0;
	if (!block || !count || !depth || depth > 64)
		fail("arguments", EINVAL);
	fd = open(argv[1], (write ? O_RDWR : O_RDONLY) | direct);
	if (fd < 0)
		fail(argv[1], errno);
	memory = mmap(NULL, block * depth + HUGE, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		fail("mmap", errno);
	memory += HUGE - (uintptr_t)memory % HUGE;
	madvise(memory, block * depth, getenv("KVIO_FLOOR_SMALL_PAGES") ? MADV_NOHUGEPAGE
									 : MADV_HUGEPAGE);
	memset(memory, 1, block * depth);
	shuffle((unsigned)number(argc, argv, 8, 1));
	if (uring)
		setup(&ring);
	wall = seconds(CLOCK_MONOTONIC);
	cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
	if (uring)
		run_uring(&ring, write);
	else
		run_threads();
	wall = seconds(CLOCK_MONOTONIC) - wall;
	cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
	printf("{\"nbytes\": %lu, \"seconds\": %.6f, \"cpu_seconds\": %.6f}\n", block * count,
	       wall, cpu);
	return 0;
}
