/* SPDX-License-Identifier: Apache-2.0 */
/* CRC-32C on 64-bit Arm: see crc32c.h for why folding gives the CRC. */
#include "crc32c.h"

#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <arm_acle.h>
#include <arm_neon.h>
#include <string.h>
#include <sys/auxv.h>

#ifndef HWCAP_PMULL
#define HWCAP_PMULL (1 << 4)
#endif
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#define CRC __attribute__((target("+crc")))
#define PMULL __attribute__((target("+crc+crypto")))
#define AHEAD 1024	/* bytes that a software prefetch runs ahead of the loads */

/* {x^(distance+64), x^distance} for each distance in bits that is folded over. */
static uint64_t by_128[2], by_1024[2];

/* ---- the instruction, 8 bytes at a time: short inputs and what folding leaves over ---- */

CRC static inline uint32_t step(uint32_t reg, const uint8_t *p, size_t nbytes)
{
	uint64_t word;
	uint32_t half;

	for (; nbytes >= 8; p += 8, nbytes -= 8) {
		memcpy(&word, p, 8);
		reg = __crc32cd(reg, word);
	}
	if (nbytes & 4) {
		memcpy(&half, p, 4);
		reg = __crc32cw(reg, half);
		p += 4;
	}
	for (nbytes &= 3; nbytes--; p++)
		reg = __crc32cb(reg, *p);
	return reg;
}

CRC static uint32_t crc_crc(uint32_t crc, const void *data, size_t nbytes)
{
	return ~step(~crc, data, nbytes);
}

/* ---- 16 bytes a multiplication, 128 bytes a turn ---- */

PMULL static inline uint64x2_t load16(const uint8_t *p)
{
	return vreinterpretq_u64_u8(vld1q_u8(p));
}

PMULL static inline uint64x2_t fold16(uint64x2_t from, uint64x2_t factors, uint64x2_t onto)
{
	poly128_t low = vmull_p64((poly64_t)vgetq_lane_u64(from, 0),
				  (poly64_t)vgetq_lane_u64(factors, 0));
	poly128_t high = vmull_high_p64(vreinterpretq_p64_u64(from),
					vreinterpretq_p64_u64(factors));

	return veorq_u64(veorq_u64(vreinterpretq_u64_p128(low), vreinterpretq_u64_p128(high)),
			 onto);
}

PMULL static uint32_t crc_pmull(uint32_t crc, const void *data, size_t nbytes)
{
	const uint8_t *p = data;
	uint64x2_t x[8], factors;
	int i;

	if (nbytes < 256)
		return crc_crc(crc, data, nbytes);
	for (i = 0; i < 8; i++)
		x[i] = load16(p + 16 * i);
	x[0] = veorq_u64(x[0], vsetq_lane_u64((uint32_t)~crc, vdupq_n_u64(0), 0));
	p += 128;
	nbytes -= 128;
	factors = vld1q_u64(by_1024);
	for (; nbytes >= 128; p += 128, nbytes -= 128) {
		__builtin_prefetch(p + AHEAD);
		__builtin_prefetch(p + AHEAD + 64);
#pragma GCC unroll 8
		for (i = 0; i < 8; i++)
			x[i] = fold16(x[i], factors, load16(p + 16 * i));
	}
	factors = vld1q_u64(by_128);
	for (i = 1; i < 8; i++)
		x[0] = fold16(x[0], factors, x[i]);
	for (; nbytes >= 16; p += 16, nbytes -= 16)
		x[0] = fold16(x[0], factors, load16(p));
	crc = __crc32cd(__crc32cd(0, vgetq_lane_u64(x[0], 0)), vgetq_lane_u64(x[0], 1));
	return ~step(crc, p, nbytes);
}

/* ---- which of them this CPU has ---- */

static int usable_crc(void)
{
	return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}

static int usable_pmull(void)
{
	by_128[0] = crc32c_factor(128 + 64);
	by_128[1] = crc32c_factor(128);
	by_1024[0] = crc32c_factor(1024 + 64);
	by_1024[1] = crc32c_factor(1024);
	return usable_crc() && (getauxval(AT_HWCAP) & HWCAP_PMULL) != 0;
}

const struct crc32c_candidate crc32c_candidates[] = {
	{{"pmull", crc_pmull}, usable_pmull},
	{{"crc", crc_crc}, usable_crc},
	{{NULL, NULL}, NULL},
};
#endif
