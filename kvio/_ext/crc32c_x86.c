/* SPDX-License-Identifier: Apache-2.0 */
/* CRC-32C on x86-64: see crc32c.h for why folding gives the CRC. */
#include "crc32c.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#define SSE42 __attribute__((target("sse4.2")))
#define PCLMUL __attribute__((target("sse4.2,pclmul")))
#define AVX512 __attribute__((target("sse4.2,pclmul,avx512f,avx512vl,avx512dq,vpclmulqdq")))
#define PAGE 4096u
#define GROUP (8 * PAGE)
#define AHEAD 4096	/* bytes that a software prefetch runs ahead of the loads */

/* {x^(distance+64), x^distance} for each distance in bits that is folded over. */
static uint64_t by_128[2], by_512[2], by_1024[2], by_2048[2], by_page[2];
static uint64_t lanes[8];	/* of a 64-byte register onto its last 16 bytes, which stay */

/* ---- the instruction, 8 bytes in 3 cycles: short inputs and what folding leaves over ---- */

SSE42 static inline uint32_t step(uint32_t reg, const uint8_t *p, size_t nbytes)
{
	uint64_t wide = reg, word;
	uint32_t half;

	for (; nbytes >= 8; p += 8, nbytes -= 8) {
		memcpy(&word, p, 8);
		wide = _mm_crc32_u64(wide, word);
	}
	reg = (uint32_t)wide;
	if (nbytes & 4) {
		memcpy(&half, p, 4);
		reg = _mm_crc32_u32(reg, half);
		p += 4;
	}
	for (nbytes &= 3; nbytes--; p++)
		reg = _mm_crc32_u8(reg, *p);
	return reg;
}

SSE42 static uint32_t crc_sse42(uint32_t crc, const void *data, size_t nbytes)
{
	return ~step(~crc, data, nbytes);
}

/* ---- 16 bytes a multiplication, 128 bytes a turn ---- */

PCLMUL static inline __m128i load16(const uint8_t *p)
{
	return _mm_loadu_si128((const __m128i *)p);
}

PCLMUL static inline __m128i fold16(__m128i from, __m128i factors, __m128i onto)
{
	return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(from, factors, 0x00),
					   _mm_clmulepi64_si128(from, factors, 0x11)), onto);
}

PCLMUL static inline uint32_t reduce16(__m128i x)
{
	uint64_t reg = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(x));

	return (uint32_t)_mm_crc32_u64(reg, (uint64_t)_mm_extract_epi64(x, 1));
}

PCLMUL static uint32_t crc_pclmul(uint32_t crc, const void *data, size_t nbytes)
{
	const uint8_t *p = data;
	__m128i x[8], factors;
	int i;

	if (nbytes < 256)
		return crc_sse42(crc, data, nbytes);
	for (i = 0; i < 8; i++)
		x[i] = load16(p + 16 * i);
	x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)~crc));
	p += 128;
	nbytes -= 128;
	factors = load16((const uint8_t *)by_1024);
	for (; nbytes >= 128; p += 128, nbytes -= 128) {
		_mm_prefetch((const char *)p + AHEAD, _MM_HINT_T0);
		_mm_prefetch((const char *)p + AHEAD + 64, _MM_HINT_T0);
#pragma GCC unroll 8
		for (i = 0; i < 8; i++)
			x[i] = fold16(x[i], factors, load16(p + 16 * i));
	}
	factors = load16((const uint8_t *)by_128);
	for (i = 1; i < 8; i++)
		x[0] = fold16(x[0], factors, x[i]);
	for (; nbytes >= 16; p += 16, nbytes -= 16)
		x[0] = fold16(x[0], factors, load16(p));
	return ~step(reduce16(x[0]), p, nbytes);
}

/* ---- 64 bytes a multiplication, 256 bytes a turn, or a line of each of 8 pages ---- */

AVX512 static inline __m512i load64(const uint8_t *p)
{
	return _mm512_loadu_si512(p);
}

AVX512 static inline __m512i fold64(__m512i from, __m512i factors, __m512i onto)
{
	return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(from, factors, 0x00),
					 _mm512_clmulepi64_epi128(from, factors, 0x11), onto,
					 0x96);		/* a ^ b ^ c */
}

AVX512 static inline __m512i factors64(const uint64_t *pair)
{
	return _mm512_broadcast_i64x2(_mm_loadu_si128((const __m128i *)pair));
}

AVX512 static inline __m512i begin64(uint32_t reg, const uint8_t *p)
{
	return _mm512_xor_si512(load64(p),
				_mm512_zextsi128_si512(_mm_cvtsi32_si128((int)reg)));
}

AVX512 static inline uint32_t reduce64(__m512i x)
{
	__m512i folded = fold64(x, load64((const uint8_t *)lanes), _mm512_setzero_si512());
	__m128i sum = _mm512_extracti64x2_epi64(x, 3);

	sum = _mm_ternarylogic_epi64(sum, _mm512_extracti64x2_epi64(folded, 0),
				     _mm512_extracti64x2_epi64(folded, 1), 0x96);
	return reduce16(_mm_xor_si128(sum, _mm512_extracti64x2_epi64(folded, 2)));
}

/* nbytes: a multiple of 64, at least 256. */
AVX512 static uint32_t fold_lines(uint32_t reg, const uint8_t *p, size_t nbytes)
{
	__m512i factors = factors64(by_2048);
	__m512i x[4] = {begin64(reg, p), load64(p + 64), load64(p + 128), load64(p + 192)};
	int i;

	for (p += 256, nbytes -= 256; nbytes >= 256; p += 256, nbytes -= 256)
#pragma GCC unroll 4
		for (i = 0; i < 4; i++)
			x[i] = fold64(x[i], factors, load64(p + 64 * i));
	factors = factors64(by_512);
#pragma GCC unroll 4
	for (i = 1; i < 4; i++)
		x[0] = fold64(x[0], factors, x[i]);
	for (; nbytes; p += 64, nbytes -= 64)
		x[0] = fold64(x[0], factors, load64(p));
	return reduce64(x[0]);
}

/*
 * nbytes: a multiple of GROUP, at least one. The hardware prefetches within a page: reading eight
 * pages at once keeps more of memory's latency in flight, and cold data come 1.4 times as fast as
 * one page after the other (0.77 of a loop that only reads, against 1.1).
 */
AVX512 static uint32_t fold_pages(uint32_t reg, const uint8_t *p, size_t nbytes)
{
	__m512i line = factors64(by_512), page = factors64(by_page), x[8];
	const uint8_t *end = p + nbytes;
	size_t at;
	int i;

	x[0] = begin64(reg, p);
	for (;;) {
#pragma GCC unroll 8
		for (i = 1; i < 8; i++)
			x[i] = load64(p + PAGE * i);
		for (at = 64; at < PAGE; at += 64)
#pragma GCC unroll 8
			for (i = 0; i < 8; i++)
				x[i] = fold64(x[i], line, load64(p + PAGE * i + at));
#pragma GCC unroll 8
		for (i = 1; i < 8; i++)
			x[0] = fold64(x[0], page, x[i]);
		p += GROUP;
		if (p == end)
			return reduce64(x[0]);
		x[0] = fold64(x[0], line, load64(p));
	}
}

AVX512 static uint32_t crc_avx512(uint32_t crc, const void *data, size_t nbytes)
{
	const uint8_t *p = data;
	size_t part;

	if (nbytes < 256)
		return crc_sse42(crc, data, nbytes);
	crc = ~crc;
	part = -(uintptr_t)p & 63;
	if (part && nbytes >= 4096) {	/* a load that straddles two cache lines costs two */
		crc = step(crc, p, part);
		p += part;
		nbytes -= part;
	}
	part = nbytes & ~(size_t)(GROUP - 1);
	if (part) {
		crc = fold_pages(crc, p, part);
		p += part;
		nbytes -= part;
	}
	part = nbytes & ~(size_t)63;
	if (part >= 256) {
		crc = fold_lines(crc, p, part);
		p += part;
		nbytes -= part;
	}
	return ~step(crc, p, nbytes);
}

/* ---- which of them this CPU has ---- */

static void set_factors(uint64_t *pair, unsigned int distance)
{
	pair[0] = crc32c_factor(distance + 64);
	pair[1] = crc32c_factor(distance);
}

static int usable_sse42(void)
{
	__builtin_cpu_init();
	return __builtin_cpu_supports("sse4.2");
}

static int usable_pclmul(void)
{
	set_factors(by_128, 128);
	set_factors(by_1024, 1024);
	return usable_sse42() && __builtin_cpu_supports("pclmul");
}

static int usable_avx512(void)
{
	for (unsigned int lane = 0; lane < 3; lane++)
		set_factors(lanes + 2 * lane, 128 * (3 - lane));
	set_factors(by_512, 512);
	set_factors(by_2048, 2048);
	set_factors(by_page, 8 * PAGE);
	return usable_pclmul() && __builtin_cpu_supports("avx512f") &&
	       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
	       __builtin_cpu_supports("vpclmulqdq");
}

const struct crc32c_candidate crc32c_candidates[] = {
	{{"avx512", crc_avx512}, usable_avx512},
	{{"pclmul", crc_pclmul}, usable_pclmul},
	{{"sse4.2", crc_sse42}, usable_sse42},
	{{NULL, NULL}, NULL},
};
#endif
