/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies pieces between pinned host memory and device memory with a few SMs.
 *
 * A link of 55 GB/s and 1.5 us has some 80 KB under way. A lane has eight loads of 16 bytes in
 * flight before its first store, so a warp has 4 KiB and a block of 1024 threads 128 KiB: one SM
 * or two can fill it. A warp takes a piece, then the one that is a grid of warps further, whose
 * descriptor (in host memory too) is loaded while it copies. Nothing is shared among threads, so
 * that C can run them one after the other, as the tests do.
 *
 * .ci/ptx makes copy_kernel.ptx of this file, after every change.
 */
#ifdef __CUDACC__
#define EXTERN_C extern "C"
#define INLINE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#else
/* On the CPU a call is a thread of the grid: the caller sets these first. */
#define EXTERN_C
#define INLINE static inline
#define UNROLL
#define __global__
#define __launch_bounds__(threads)
static __thread struct { unsigned int x; } threadIdx, blockIdx, blockDim, gridDim;
typedef struct { unsigned int x, y, z, w; } uint4;
#endif

#define LANES 32u
#define IN_FLIGHT 8u
#define STEP (LANES * 16u)		/* bytes from a lane's load to its next one */
#define ROUND (IN_FLIGHT * STEP)

/* struct cuda_copy. All three are multiples of 16. */
struct kvio_piece {
	unsigned long long target;
	unsigned long long source;
	unsigned long long nbytes;
};

/* Volatile, because they have to be issued in this order. Bytes that nobody reads again should
 * not push the model's out of the caches. `there`: predicated, so that no lane waits in a branch
 * for another one; what is not there is 0 (undefined, it would keep its registers for ever). */
INLINE uint4 load_16(unsigned long long from, unsigned int there)
{
#ifdef __CUDACC__
	uint4 bytes;

	asm volatile("{\n"
		     ".reg .pred there;\n"
		     "setp.ne.u32 there, %5, 0;\n"
		     "mov.u32 %0, 0;\n"
		     "mov.u32 %1, 0;\n"
		     "mov.u32 %2, 0;\n"
		     "mov.u32 %3, 0;\n"
		     "@there ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
		     "}"
		     : "=&r"(bytes.x), "=&r"(bytes.y), "=&r"(bytes.z), "=&r"(bytes.w)
		     : "l"(from), "r"(there));
	return bytes;
#else
	return there ? *(const uint4 *)from : (uint4){ 0, 0, 0, 0 };
#endif
}

INLINE void store_16(unsigned long long to, uint4 bytes, unsigned int there)
{
#ifdef __CUDACC__
	asm volatile("{\n"
		     ".reg .pred there;\n"
		     "setp.ne.u32 there, %5, 0;\n"
		     "@there st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};\n"
		     "}"
		     :: "l"(to), "r"(bytes.x), "r"(bytes.y), "r"(bytes.z), "r"(bytes.w),
			"r"(there)
		     : "memory");
#else
	if (there)
		*(uint4 *)to = bytes;
#endif
}

INLINE unsigned long long load_8(const unsigned long long *from)
{
#ifdef __CUDACC__
	unsigned long long word;

	asm volatile("ld.global.L1::no_allocate.u64 %0, [%1];" : "=l"(word) : "l"(from));
	return word;
#else
	return *from;
#endif
}

INLINE struct kvio_piece load_piece(const struct kvio_piece *from)
{
	struct kvio_piece piece;

	piece.target = load_8(&from->target);
	piece.source = load_8(&from->source);
	piece.nbytes = load_8(&from->nbytes);
	return piece;
}

/* One round of a lane; `left` bytes of the piece lie at or behind its first load. */
INLINE void copy_round(unsigned long long target, unsigned long long source, unsigned int left)
{
	uint4 bytes[IN_FLIGHT];

	UNROLL for (unsigned int i = 0; i < IN_FLIGHT; i++)
		bytes[i] = load_16(source + i * STEP, i * STEP < left);
	UNROLL for (unsigned int i = 0; i < IN_FLIGHT; i++)
		store_16(target + i * STEP, bytes[i], i * STEP < left);
}

INLINE void copy_piece(const struct kvio_piece *piece, unsigned int lane)
{
	unsigned long long target = piece->target + lane * 16u;
	unsigned long long source = piece->source + lane * 16u;
	unsigned long long left = piece->nbytes > lane * 16u ? piece->nbytes - lane * 16u : 0;

	for (; left > ROUND - STEP; left -= left < ROUND ? left : ROUND) {
		copy_round(target, source, ROUND);
		target += ROUND;
		source += ROUND;
	}
	if (left)
		copy_round(target, source, (unsigned int)left);
}

/* Few pieces are spread over the blocks before their warps: every SM has a queue of its own. */
EXTERN_C __global__ void __launch_bounds__(1024)
kvio_copy(const struct kvio_piece *pieces, unsigned int count)
{
	unsigned int lane = threadIdx.x % LANES;
	unsigned int at = threadIdx.x / LANES * gridDim.x + blockIdx.x;
	unsigned int warps = blockDim.x / LANES * gridDim.x;
	struct kvio_piece next = { 0, 0, 0 };

	if (at < count)
		next = load_piece(&pieces[at]);
	for (; at < count; at += warps) {
		struct kvio_piece piece = next;

		if (count - at > warps)
			next = load_piece(&pieces[at + warps]);
		copy_piece(&piece, lane);
	}
}
