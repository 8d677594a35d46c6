/* SPDX-License-Identifier: Apache-2.0 */
/* The second half of usrbio_standin.c: rings, and the threads that play the daemon. */

static int64_t move(struct ring *ring, const struct job *job, struct iov *iov)
{
	long value;
	uint64_t len = job->len;
	uint8_t *at = iov->base + job->at;
	ssize_t moved;

	if (job->at > iov->size || len > iov->size - job->at)
		return -EINVAL;
	if (iov->block_size && job->at / iov->block_size !=
	    (job->at + len - 1) / iov->block_size)
		return -EINVAL;
	if (ring->for_read && (ring->flags & 2) && fault(HOLES, 1, &value)) {
		off_t hole = lseek(job->fd, (off_t)job->off, SEEK_HOLE), end;

		end = lseek(job->fd, 0, SEEK_END);
		if (hole >= 0 && hole < (off_t)(job->off + len) && hole < end)
			return -ENODATA;
	}
	/* 3FS knows no alignment, the file that plays it may be O_DIRECT: all is moved. */
	moved = ring->for_read ? pread(job->fd, at, len, (off_t)job->off)
			       : pwrite(job->fd, at, len, (off_t)job->off);
	if (fault(SHORT, ring->for_read ? 1 : 2, &value) && value < moved) {
		if (ring->for_read)
			memset(at + value, 0x5a, (size_t)(moved - value));
		moved = value;
	}
	return moved < 0 ? -errno : moved;
}

static int64_t serve(struct ring *ring, const struct job *job)
{
	int mask = ring->for_read ? 1 : 2;
	struct iov *iov;
	struct stat st;
	int64_t result;
	long value;

	if (fault(DELAY_US, mask, &value))
		usleep((useconds_t)value);
	if (fault(RESULT, mask, &value))
		return value;
	pthread_mutex_lock(&lock);
	for (iov = iovs; iov && memcmp(iov->id, job->id, 16); iov = iov->next)
		;
	if (iov)
		iov->users++;
	pthread_mutex_unlock(&lock);
	if (!iov)
		return -EINVAL;
	if (lstat(iov->link, &st) < 0)
		result = -EINVAL;
	else if (strstr(iov->target, "kvio-pool-") && fault(DENY, mask, &value))
		result = -EACCES;	/* the NIC did not take it */
	else
		result = move(ring, job, iov);
	pthread_mutex_lock(&lock);
	iov->users--;
	iov->bytes += result > 0 ? result : 0;
	counters[IOS]++;
	pthread_mutex_unlock(&lock);
	return result;
}

static void *worker_main(void *arg)
{
	struct ring *ring = arg;

	pthread_mutex_lock(&ring->lock);
	while (!ring->stop) {
		struct hf3fs_cqe cqe = { 0, (int32_t)0xdeadbeef, 0, NULL };
		int at = 0, to;
		struct job job;
		long value;

		if (ring->released == 0) {
			pthread_cond_wait(&ring->work, &ring->lock);
			continue;
		}
		if (fault(SHUFFLE, 3, &value))
			at = (int)roll((unsigned)ring->released);
		job = ring->queue[at];
		ring->queued--;
		ring->released--;
		memmove(&ring->queue[at], &ring->queue[at + 1],
			(size_t)(ring->queued - at) * sizeof(job));
		pthread_mutex_unlock(&ring->lock);
		cqe.index = job.index;
		cqe.userdata = job.userdata;
		cqe.result = serve(ring, &job);
		pthread_mutex_lock(&ring->lock);
		to = ring->num_cqes++;
		if (fault(SHUFFLE, 3, &value))
			to = (int)roll((unsigned)ring->num_cqes);
		ring->cqes[ring->num_cqes - 1] = ring->cqes[to];
		ring->cqes[to] = cqe;
		pthread_cond_signal(&ring->done);
	}
	pthread_mutex_unlock(&ring->lock);
	return NULL;
}

/* flags in binary when the link is made, in decimal when it is to be removed: as 3FS does it. */
static void attributes_of(char out[128], bool for_read, int io_depth, int priority, int timeout,
			  uint64_t flags, bool binary)
{
	int length = snprintf(out, 128, ".%c%d%s.t%d", for_read ? 'r' : 'w', io_depth,
			      priority == 0 ? "" : priority < 0 ? ".ph" : ".pl", timeout);

	if (flags && !binary)
		snprintf(out + length, 128 - (size_t)length, ".f%llu", (unsigned long long)flags);
	else if (flags)
		snprintf(out + length, 128 - (size_t)length, flags & 2 ? ".f1%d" : ".f%d",
			 (int)(flags & 1));
}

static int ring_create(struct hf3fs_ior *ior, const char *mount_point, int entries, bool for_read,
		       int io_depth, int priority, int timeout, uint64_t flags)
{
	struct ring *ring;
	char attributes[128], shm[128];
	long injected;
	int rc;

	if (io_depth < 0 || io_depth > entries || entries <= 0 || timeout < 0)
		return -EINVAL;		/* the depth: as the newer daemons */
	attributes_of(attributes, for_read, io_depth, priority, timeout, flags, true);
	rc = publish(&ior->iov, mount_point, RING_SHM_BYTES, attributes, shm);
	if (rc < 0)
		return rc;
	unlink(shm);
	if (fault(CREATE, for_read ? 1 : 2, &injected)) {
		unpublish(&ior->iov, "");	/* as 3FS: the link stays */
		return (int)injected;
	}
	ring = calloc(1, sizeof(*ring));
	pthread_mutex_init(&ring->lock, NULL);
	pthread_cond_init(&ring->work, NULL);
	pthread_cond_init(&ring->done, NULL);
	ring->queue = calloc((size_t)entries, sizeof(*ring->queue));
	ring->cqes = calloc((size_t)entries + 1, sizeof(*ring->cqes));
	ring->for_read = ior->for_read = for_read;
	ring->entries = entries;
	ring->depth = ior->io_depth = io_depth;
	ring->flags = ior->flags = flags;
	ior->priority = priority;
	ior->timeout = timeout;
	strcpy(ior->mount_point, mount_point);
	ior->iorh = ring;
	for (int i = 0; i < WORKERS; i++)
		pthread_create(&ring->workers[i], NULL, worker_main, ring);
	pthread_mutex_lock(&lock);
	ring->next = rings;
	rings = ring;
	counters[RINGS]++;
	pthread_mutex_unlock(&lock);
	return 0;
}

EXPORT int hf3fs_iorcreate4(struct hf3fs_ior *ior, const char *mount_point, int entries,
			    bool for_read, int io_depth, int timeout, int numa, uint64_t flags)
{
	return ring_create(ior, mount_point, entries, for_read, io_depth, 0, timeout, flags);
}

EXPORT int hf3fs_iorcreate3(struct hf3fs_ior *ior, const char *mount_point, int entries,
			    bool for_read, int io_depth, int priority, int timeout, int numa)
{
	return ring_create(ior, mount_point, entries, for_read, io_depth, priority, timeout, 0);
}

EXPORT int hf3fs_iorcreate2(struct hf3fs_ior *ior, const char *mount_point, int entries,
			    bool for_read, int io_depth, int priority, int numa)
{
	return ring_create(ior, mount_point, entries, for_read, io_depth, priority, 0, 0);
}

EXPORT int hf3fs_iorcreate(struct hf3fs_ior *ior, const char *mount_point, int entries,
			   bool for_read, int io_depth, int numa)
{
	return ring_create(ior, mount_point, entries, for_read, io_depth, 0, 0, 0);
}

EXPORT void hf3fs_iordestroy(struct hf3fs_ior *ior)
{
	struct ring *ring = ior->iorh, **at = &rings;
	char attributes[128];

	attributes_of(attributes, ior->for_read, ior->io_depth, ior->priority, ior->timeout,
		      ior->flags, false);
	unpublish(&ior->iov, attributes);
	pthread_mutex_lock(&lock);
	while (*at != ring)
		at = &(*at)->next;
	*at = ring->next;
	counters[RINGS]--;
	pthread_mutex_unlock(&lock);
	pthread_mutex_lock(&ring->lock);
	ring->stop = true;
	pthread_cond_broadcast(&ring->work);
	pthread_mutex_unlock(&ring->lock);
	for (int i = 0; i < WORKERS; i++)
		pthread_join(ring->workers[i], NULL);
	free(ring->queue);
	free(ring->cqes);
	free(ring);
	ior->iorh = NULL;
}

EXPORT size_t hf3fs_ior_size(int entries)
{
	return 16 + 32 + 96 * ((size_t)entries + 1) + 4096;
}

EXPORT int hf3fs_io_entries(const struct hf3fs_ior *ior)
{
	return ((struct ring *)ior->iorh)->entries;
}

static int check_prep(const struct ring *ring, const struct hf3fs_iov *iov, bool read,
		      const uint8_t *ptr, int fd, uint64_t len, int *use)
{
	struct reg *reg;
	int number = fd < 0 ? -fd : fd, rc = 0;

	if (read != ring->for_read || !ptr || len == 0 || ptr < iov->base ||
	    ptr > iov->base + iov->size || len > (size_t)(iov->base + iov->size - ptr))
		return -EINVAL;
	pthread_mutex_lock(&lock);
	reg = number < MAX_FDS ? regs[number] : NULL;
	if (!reg)
		rc = -EBADF;
	else if ((reg->flags & O_ACCMODE) == (read ? O_WRONLY : O_RDONLY))
		rc = -EACCES;
	else
		*use = reg->dup_fd;
	pthread_mutex_unlock(&lock);
	return rc;
}

EXPORT int hf3fs_prep_io(const struct hf3fs_ior *ior, const struct hf3fs_iov *iov, bool read,
			 void *ptr, int fd, size_t off, uint64_t len, const void *userdata)
{
	struct ring *ring = ior->iorh;
	int use = -1, rc = check_prep(ring, iov, read, ptr, fd, len, &use);
	long injected;

	if (rc < 0)
		return rc;
	if (fault(PREP, read ? 1 : 2, &injected)) {
		count(REFUSED, 1);
		return (int)injected;
	}
	pthread_mutex_lock(&ring->lock);
	if (ring->in_flight == ring->entries) {
		rc = -EAGAIN;
	} else {
		struct job job = { .at = (size_t)((uint8_t *)ptr - iov->base), .fd = use,
				   .off = off, .len = len, .userdata = userdata,
				   .index = rc = ring->next_index++ % (ring->entries + 1) };

		memcpy(job.id, iov->id, 16);
		ring->queue[ring->queued++] = job;
		ring->in_flight++;
	}
	pthread_mutex_unlock(&ring->lock);
	count(rc == -EAGAIN ? REFUSED : PREPS, 1);
	return rc;
}

EXPORT int hf3fs_submit_ios(const struct hf3fs_ior *ior)
{
	count(SUBMITS, 1);
	release(ior->iorh);
	return 0;
}

EXPORT int hf3fs_wait_for_ios(const struct hf3fs_ior *ior, struct hf3fs_cqe *cqes, int cqec,
			      int min_results, const struct timespec *abs_timeout)
{
	struct ring *ring = ior->iorh;
	int filled = 0, rc = 0;
	long injected;

	if (cqec <= 0)
		return -EINVAL;
	count(WAITS, 1);
	if (fault(WAIT, ring->for_read ? 1 : 2, &injected))
		return (int)injected;
	if (fault(STRAY, 3, &injected)) {
		cqes[0] = (struct hf3fs_cqe){ 0, 0, 1, (const void *)(uintptr_t)injected };
		return 1;
	}
	if (fault(ONE, 3, &injected))
		cqec = 1;
	if (min_results > cqec)
		min_results = cqec;
	pthread_mutex_lock(&ring->lock);
	while (filled < cqec) {
		if (ring->num_cqes) {
			cqes[filled++] = ring->cqes[0];
			ring->in_flight--;
			memmove(&ring->cqes[0], &ring->cqes[1],
				(size_t)--ring->num_cqes * sizeof(*cqes));
		} else if (filled >= min_results || rc) {
			break;			/* enough, or too late: what there is */
		} else if (abs_timeout) {
			rc = pthread_cond_timedwait(&ring->done, &ring->lock, abs_timeout);
		} else {
			pthread_cond_wait(&ring->done, &ring->lock);
		}
	}
	pthread_mutex_unlock(&ring->lock);
	return filled;
}

EXPORT int hf3fs_hardlink(const char *target, const char *link_name)
{
	return link(target, link_name) < 0 ? errno : 0;
}

EXPORT int hf3fs_punchhole(int fd, int n, const size_t *start, const size_t *end, size_t flags)
{
	for (int i = 0; i < n && i < 1000; i++)
		if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)start[i],
			      (off_t)(end[i] - start[i])) < 0)
			return errno;
	return 0;
}
