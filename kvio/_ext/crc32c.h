/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_CRC32C_H
#define KVIO_CRC32C_H
/*
 * What the files of CRC-32C share.
 *
 * Folding. Read a message as a polynomial over GF(2) whose first bit has the highest power; its
 * CRC register is (message * x^32 + register * x^bits) mod P. Registers and loads are
 * bit-reflected: bit i of a 64-bit little-endian load is x^(63-i), and of 16 bytes
 * A = low * x^64 + high. What lies `distance` bits before other bits counts x^distance times as
 * much, and only its residue matters:
 *
 *	A * x^distance = low * x^(distance+64) + high * x^distance	(mod P)
 *
 * Both products are one carry-less multiplication of 64 by 32 bits, and their sum fits in 128
 * bits, so it is added to the 16 bytes that lie `distance` bits further on. A multiplication of
 * reflected numbers is one bit short (bits i and j meet in bit i+j: x^(63-i) * x^(63-j) lands
 * where x^(127-i-j) stands), that is, it multiplies by x once more, and the constant is
 * x^(n-1) mod P for a factor of x^n. What is left at the end are 16 bytes whose CRC from a
 * register of zero the CPU's CRC instruction gives: that is the reduction mod P.
 *
 * All this follows from the definition of the CRC; the constants are computed when the module is
 * loaded, by multiplying by x often enough.
 */
#include "kvio/block.h"

/* x^n mod P, reflected: bit 31 is x^0. */
uint32_t crc32c_power(unsigned int n);

/* The factor x^n for a carry-less multiplication of reflected 64-bit numbers. */
static inline uint64_t crc32c_factor(unsigned int n)
{
	return (uint64_t)crc32c_power(n - 1) << 32;
}

/* Of one kind of CPU, best first; `crc` NULL ends it. */
struct crc32c_candidate {
	struct kvio_crc32c_impl impl;
	int (*usable)(void);		/* computes the constants as well */
};
extern const struct crc32c_candidate crc32c_candidates[];

#endif
