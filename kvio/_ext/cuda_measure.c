/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What each way costs on this machine, from the time of a few copies until they are complete: a
 * small one, many small ones, many bytes (cuda_choose.c makes figures of them). Some tens of
 * milliseconds: each is the least of three after a first one, but once they have taken long, one
 * run has to do. A process keeps what it found, for a device that is closed and opened again.
 */
#include "cuda_impl.h"

#define SCRATCH_NBYTES (16u << 20)	/* of the device, and of pinned host memory */
#define LONG_NS 40000000u
#define MAX_STEPS 12u			/* 1, 2, 4, ... SMs */
#define MAX_KNOWN 16u			/* devices whose figures are kept */

struct bench {
	struct cuda_dev *dev;
	uint64_t host, device;
	uint64_t start_ns;
	uint32_t sms;
	struct cuda_failure failure;	/* of the last run that failed */
};

/* ---- what is copied ---- */

static uint64_t source_of(const struct bench *bench, uint32_t kind)
{
	return kind == KVIO_H2D || kind == KVIO_H2H ? bench->host : bench->device;
}

/* Within one memory the other half of it. */
static uint64_t target_of(const struct bench *bench, uint32_t kind)
{
	if (kind == KVIO_H2H)
		return bench->host + SCRATCH_NBYTES / 2;
	if (kind == KVIO_D2D)
		return bench->device + SCRATCH_NBYTES / 2;
	return kind == KVIO_H2D ? bench->device : bench->host;
}

/* Pieces in an order of the source in which no two touch. */
static uint32_t scatter(const struct bench *bench, uint32_t kind, const struct cuda_sample *sample)
{
	uint64_t source = source_of(bench, kind), target = target_of(bench, kind);

	for (uint32_t i = 0; i < sample->calls; i++)
		bench->dev->copies[i] = (struct cuda_copy){
			.source = source + i * 37ull % sample->calls * sample->width,
			.target = target + i * sample->width, .nbytes = sample->width,
		};
	return sample->calls;
}

/* Rectangles, each in a place and with a pitch that its neighbours do not have. */
static uint32_t rows_apart(const struct bench *bench, uint32_t kind,
			   const struct cuda_sample *sample)
{
	uint64_t source = source_of(bench, kind), target = target_of(bench, kind);
	uint64_t place = SCRATCH_NBYTES / sample->calls;
	uint32_t made = 0;

	for (uint32_t call = 0; call < sample->calls; call++) {
		uint64_t pitch = place / sample->rows - 4096 * (1 + (call & 1));

		for (uint32_t row = 0; row < sample->rows; row++)
			bench->dev->copies[made++] = (struct cuda_copy){
				.source = source + call * place + row * pitch,
				.target = target + call * place + row * pitch,
				.nbytes = sample->width,
			};
	}
	return made;
}

/* ---- the clock ---- */

/* One run, until it is complete; below 0: it failed, or did not go this way. */
static double run_once(struct bench *bench, uint32_t kind, uint32_t way,
		       const struct cuda_sample *sample)
{
	struct cuda_dev *dev = bench->dev;
	struct cuda_carry carry = {
		.dev = dev, .stream = dev->own, .kind = kind, .sms = bench->sms,
	};
	uint32_t count = way == KVIO_COPY_STRIDED ? rows_apart(bench, kind, sample) :
						    scatter(bench, kind, sample);
	uint64_t start_ns = kvio_monotonic_ns();
	int ways = cuda_carry_by(&carry, way, dev->copies, count);
	CUresult code = cuda.stream_sync(dev->own);
	uint64_t ns = kvio_monotonic_ns() - start_ns;

	cuda_chunks_give(dev, carry.chunks);
	if (ways >= 0 && code != CUDA_OK)
		carry.failure = (struct cuda_failure){ code, "cuStreamSynchronize" };
	if (carry.failure.code) {
		bench->failure = carry.failure;
		cuda_note(dev, carry.failure.code, carry.failure.call);
	}
	return ways == 1 << way && code == CUDA_OK ? (double)ns : -1;
}

static double least_of(struct bench *bench, uint32_t kind, uint32_t way,
		       const struct cuda_sample *sample)
{
	double ns = run_once(bench, kind, way, sample), again;

	for (int i = 0; i < 3 && ns >= 0; i++) {
		if (kvio_monotonic_ns() - bench->start_ns > LONG_NS)
			break;
		again = run_once(bench, kind, way, sample);
		ns = i == 0 || again < ns ? again : ns;		/* the first was a warm-up */
	}
	return ns;
}

/* ---- figures ---- */

/* 1, 2, 4, ... and max_sms itself. */
static void measure_sms(struct bench *bench, uint32_t max_sms)
{
	static const struct cuda_sample sample = { 512, 1, CUDA_PIECE_NBYTES };
	uint32_t steps[MAX_STEPS], count = 0;
	double ns[MAX_STEPS][2];

	for (uint32_t sms = 1; count < MAX_STEPS; sms *= 2) {
		bench->sms = sms < max_sms && count < MAX_STEPS - 1 ? sms : max_sms;
		steps[count] = bench->sms;
		ns[count][0] = least_of(bench, KVIO_H2D, KVIO_COPY_KERNEL, &sample);
		ns[count][1] = least_of(bench, KVIO_D2H, KVIO_COPY_KERNEL, &sample);
		if (ns[count][0] < 0 || ns[count][1] < 0)
			return;
		count++;
		if (bench->sms == max_sms)
			break;
	}
	bench->sms = steps[cuda_fewest((const double (*)[2])ns, count)];
	bench->dev->info.kernel_sms = bench->sms;
}

/* A way that fails here is not taken, whatever the driver's version promised. */
static void measure_way(struct bench *bench, uint32_t kind, uint32_t way)
{
	const struct cuda_sample *samples = way == KVIO_COPY_STRIDED ? cuda_strided_samples :
								       cuda_samples;
	struct kvio_copy_cost *cost = &bench->dev->info.costs[kind][way];
	double ns[CUDA_NUM_SAMPLES] = { 0 };

	bench->failure.code = 0;
	for (uint32_t i = 0; i < CUDA_NUM_SAMPLES && samples[i].calls; i++) {
		ns[i] = least_of(bench, kind, way, &samples[i]);
		if (ns[i] < 0 && bench->failure.code && way != KVIO_COPY_LOOP)
			cuda_rule_out(bench->dev, kind, way, &bench->failure);
		if (ns[i] < 0)
			return;
	}
	*cost = cuda_cost_of(way, ns);
}

static void measure_all(struct bench *bench, uint32_t max_sms)
{
	static const uint32_t kinds[] = { KVIO_H2D, KVIO_D2H, KVIO_D2D, KVIO_H2H };
	struct kvio_cuda_info *info = &bench->dev->info;

	if (info->costs[KVIO_H2D][KVIO_COPY_KERNEL].there)
		measure_sms(bench, max_sms);
	for (uint32_t i = 0; i < KVIO_NUM_COPY_KINDS; i++)
		for (uint32_t way = 0; way < KVIO_NUM_COPY_WAYS; way++)
			if (info->costs[kinds[i]][way].there && !bench->dev->dead.code)
				measure_way(bench, kinds[i], way);
	info->measured = !bench->dev->dead.code;
}

/* ---- what is known already ---- */

/* What the figures depend on; with another driver, ways or limit they are others. */
struct key {
	int32_t driver_version, capability;
	uint32_t max_sms;			/* 0: nothing is known */
	uint32_t ways[KVIO_NUM_COPY_KINDS];	/* bits: there, before they were measured */
};

static struct {
	pthread_mutex_t lock;
	struct key keys[MAX_KNOWN];
	struct kvio_cuda_info infos[MAX_KNOWN];
} known = { .lock = PTHREAD_MUTEX_INITIALIZER };

static struct key key_of(const struct cuda_dev *dev, uint32_t max_sms)
{
	struct key key = { dev->info.driver_version, dev->info.capability, max_sms, { 0 } };

	for (uint32_t kind = 0; kind < KVIO_NUM_COPY_KINDS; kind++)
		for (uint32_t way = 0; way < KVIO_NUM_COPY_WAYS; way++)
			key.ways[kind] |= dev->info.costs[kind][way].there << way;
	return key;
}

static bool recall(struct cuda_dev *dev, const struct key *key)
{
	const struct kvio_cuda_info *info = &known.infos[dev->ordinal];
	bool same;

	pthread_mutex_lock(&known.lock);
	same = memcmp(&known.keys[dev->ordinal], key, sizeof(*key)) == 0;
	if (same) {
		memcpy(dev->info.costs, info->costs, sizeof(info->costs));
		memcpy(dev->info.missing, info->missing, sizeof(info->missing));
		dev->info.kernel_sms = info->kernel_sms;
		dev->info.measured = 1;
	}
	pthread_mutex_unlock(&known.lock);
	return same;
}

static void remember(const struct cuda_dev *dev, const struct key *key)
{
	pthread_mutex_lock(&known.lock);
	known.keys[dev->ordinal] = *key;
	known.infos[dev->ordinal] = dev->info;
	pthread_mutex_unlock(&known.lock);
}

static void measure(struct cuda_dev *dev, uint32_t max_sms)
{
	struct bench bench = { .dev = dev, .start_ns = kvio_monotonic_ns(), .sms = max_sms };
	CUdeviceptr device = 0;
	void *host = NULL;

	if (cuda.mem_alloc(&device, SCRATCH_NBYTES) == CUDA_OK &&
	    cuda.host_alloc(&host, SCRATCH_NBYTES,
			    CUDA_HOST_ALLOC_PORTABLE | CUDA_HOST_ALLOC_DEVICEMAP) == CUDA_OK) {
		bench.host = (uint64_t)host;
		bench.device = device;
		measure_all(&bench, max_sms);
	}
	if (host)
		cuda.host_free(host);
	if (device)
		cuda.mem_free(device);
}

void cuda_measure(struct cuda_dev *dev, uint32_t max_sms)
{
	bool keeps = dev->ordinal < (int)MAX_KNOWN;
	struct key key = key_of(dev, max_sms);

	if (keeps && recall(dev, &key))
		return;
	measure(dev, max_sms);
	if (keeps && dev->info.measured)
		remember(dev, &key);
}
