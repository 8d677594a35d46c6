/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_measure.c on a driver that moves nothing and takes exactly as long as the test says, by a
 * clock that nothing else moves: compiled with -Dclock_gettime=virtual_clock.
 */
#include "cuda_impl.h"

#define EXPORT __attribute__((visibility("default")))
#define DEVICE_ADDR (1ull << 60)

/* What a call costs between two memories: call_ns + pieces * piece_ns + nbytes * byte_ns; the
 * kernel's bytes go `sms_of_link` times as fast with as many SMs, and no faster with more. */
struct model {
	double call_ns, piece_ns, byte_ns;
	uint32_t sms_of_link;
	int32_t error;			/* what the call answers */
};

struct cuda_api cuda;
EXPORT struct model models[KVIO_NUM_COPY_KINDS][KVIO_NUM_COPY_WAYS];
EXPORT double sync_ns, now_ns;
EXPORT double hiccup_ns;			/* what every third wait takes longer */

int virtual_clock(clockid_t id, struct timespec *out)
{
	out->tv_sec = (time_t)(now_ns / 1e9);
	out->tv_nsec = (long)(now_ns - (double)out->tv_sec * 1e9);
	return 0;
}

const char *cuda_error_name(int code)
{
	return "CUDA_ERROR_X";
}

int cuda_note(struct cuda_dev *dev, int code, const char *call)
{
	return code;
}

static uint32_t kind_of(uint64_t target, uint64_t source)
{
	static const uint32_t kinds[2][2] = { { KVIO_H2H, KVIO_H2D }, { KVIO_D2H, KVIO_D2D } };

	return kinds[source >= DEVICE_ADDR][target >= DEVICE_ADDR];
}

static CUresult spend(uint32_t kind, uint32_t way, uint64_t pieces, uint64_t nbytes, uint32_t sms)
{
	const struct model *model = &models[kind][way];
	double rate = 1;

	if (model->sms_of_link)
		rate = sms < model->sms_of_link ? sms : model->sms_of_link;
	now_ns += model->call_ns + (double)pieces * model->piece_ns +
		  (double)nbytes * model->byte_ns / rate;
	return model->error;
}

static CUresult copy(CUdeviceptr target, CUdeviceptr source, size_t nbytes, CUstream stream)
{
	return spend(kind_of(target, source), KVIO_COPY_LOOP, 1, nbytes, 1);
}

static CUresult copy_h2d(CUdeviceptr target, const void *source, size_t nbytes, CUstream stream)
{
	return copy(target, (uint64_t)source, nbytes, stream);
}

static CUresult copy_d2h(void *target, CUdeviceptr source, size_t nbytes, CUstream stream)
{
	return copy((uint64_t)target, source, nbytes, stream);
}

static CUresult batch(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
		      struct cuda_memcpy_attributes *attributes, size_t *first, size_t num,
		      CUstream stream)
{
	uint64_t nbytes = 0;

	for (size_t i = 0; i < count; i++)
		nbytes += sizes[i];
	return spend(kind_of(*targets, *sources), KVIO_COPY_BATCH, count, nbytes, 1);
}

static CUresult copy_2d(const struct cuda_memcpy2d *what, CUstream stream)
{
	return spend(what->src_type == CUDA_MEMORY_HOST ? KVIO_H2D : KVIO_D2H, KVIO_COPY_STRIDED,
		     what->height, what->width * what->height, 1);
}

static CUresult launch(CUfunction function, unsigned int blocks, unsigned int y, unsigned int z,
		       unsigned int threads, unsigned int ty, unsigned int tz,
		       unsigned int shared, CUstream stream, void **arguments, void **extra)
{
	const struct cuda_copy *pieces = *(const struct cuda_copy **)arguments[0];
	unsigned int count = *(unsigned int *)arguments[1];
	uint64_t nbytes = 0;

	for (unsigned int i = 0; i < count; i++)
		nbytes += pieces[i].nbytes;
	if (count == 0)
		return CUDA_OK;
	return spend(kind_of(pieces->target, pieces->source), KVIO_COPY_KERNEL, count, nbytes,
		     blocks);
}

static CUresult stream_sync(CUstream stream)
{
	static uint32_t waits;

	now_ns += sync_ns + (++waits % 3 ? 0 : hiccup_ns);
	return CUDA_OK;
}

static CUresult mem_alloc(CUdeviceptr *out, size_t nbytes)
{
	*out = DEVICE_ADDR;
	return CUDA_OK;
}

static CUresult mem_free(CUdeviceptr addr)
{
	return CUDA_OK;
}

static CUresult host_alloc(void **out, size_t nbytes, unsigned int flags)
{
	*out = malloc(nbytes);
	return *out ? CUDA_OK : CUDA_OUT_OF_MEMORY;
}

static CUresult host_free(void *memory)
{
	free(memory);
	return CUDA_OK;
}

static CUresult host_device_pointer(CUdeviceptr *out, void *memory, unsigned int flags)
{
	*out = (uint64_t)memory;
	return CUDA_OK;
}

static CUresult device_attribute(int *out, int attribute, CUdevice device)
{
	*out = INT32_MAX;
	return CUDA_OK;
}

static CUresult module_load(CUmodule *out, const void *image)
{
	return CUDA_OK;
}

static CUresult module_function(CUfunction *out, CUmodule module, const char *name)
{
	return CUDA_OK;
}

/* Opens the ways of a new device and measures them; no two devices have one `ordinal`. */
EXPORT void measure(int ordinal, uint32_t max_sms, struct kvio_copy_cost *costs, uint32_t *sms)
{
	struct cuda_dev *dev = calloc(1, sizeof(*dev));

	cuda = (struct cuda_api){
		.copy = copy, .copy_h2d = copy_h2d, .copy_d2h = copy_d2h, .batch13 = batch,
		.copy_2d = copy_2d, .launch = launch, .stream_sync = stream_sync,
		.mem_alloc = mem_alloc, .mem_free = mem_free, .host_alloc = host_alloc,
		.host_free = host_free, .host_device_pointer = host_device_pointer,
		.device_attribute = device_attribute, .module_load = module_load,
		.module_function = module_function,
	};
	dev->ordinal = ordinal;
	dev->info.capability = 90;
	dev->info.driver_version = 13000;
	dev->maps_host_as_is = true;
	dev->copies = malloc(CUDA_MAX_COPIES * sizeof(*dev->copies));
	dev->rects = malloc(CUDA_MAX_COPIES * sizeof(*dev->rects));
	dev->targets = malloc(CUDA_MAX_COPIES * sizeof(*dev->targets));
	dev->sources = malloc(CUDA_MAX_COPIES * sizeof(*dev->sources));
	dev->sizes = malloc(CUDA_MAX_COPIES * sizeof(*dev->sizes));
	cuda_ways_open(dev, "PTX");
	now_ns = 0;
	cuda_measure(dev, max_sms);
	memcpy(costs, dev->info.costs, sizeof(dev->info.costs));
	*sms = dev->info.kernel_sms;
	cuda_ways_close(dev);
	free(dev->copies);
	free(dev->rects);
	free(dev->targets);
	free(dev->sources);
	free(dev->sizes);
	free(dev);
}
