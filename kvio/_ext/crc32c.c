/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CRC-32C: tables here, the CPU's instructions in crc32c_x86.c and crc32c_arm.c; the best that
 * this CPU has is chosen once, at load.
 */
#include "crc32c.h"

#define POLY 0x82f63b78u	/* 0x1edc6f41 reflected */
#define MAX_IMPLS 8

static uint32_t table[8][256];
static struct kvio_crc32c_impl impls[MAX_IMPLS + 1];	/* best first, the portable one last */

static uint32_t times_x(uint32_t poly)
{
	return poly >> 1 ^ (poly & 1 ? POLY : 0);
}

uint32_t crc32c_power(unsigned int n)
{
	uint32_t poly = 0x80000000u;

	while (n--)
		poly = times_x(poly);
	return poly;
}

uint32_t kvio_crc32c_portable(uint32_t crc, const void *data, size_t nbytes)
{
	const uint8_t *p = data;

	crc = ~crc;
	/* Slicing by 8: one table look-up per byte, eight of them independent. */
	for (; nbytes >= 8; p += 8, nbytes -= 8) {
		uint32_t low = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 |
				      (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);

		crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^
		      table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
		      table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]];
	}
	while (nbytes--)
		crc = crc >> 8 ^ table[0][(crc ^ *p++) & 255];
	return ~crc;
}

#if !defined(__x86_64__) && \
	!(defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)
const struct crc32c_candidate crc32c_candidates[] = {{{NULL, NULL}, NULL}};
#endif

__attribute__((constructor)) static void crc32c_init(void)
{
	const struct crc32c_candidate *candidate;
	unsigned int n, k, count = 0;

	for (n = 0; n < 256; n++) {
		table[0][n] = n;
		for (k = 0; k < 8; k++)
			table[0][n] = times_x(table[0][n]);
	}
	for (n = 0; n < 256; n++)
		for (k = 1; k < 8; k++)
			table[k][n] = table[k - 1][n] >> 8 ^ table[0][table[k - 1][n] & 255];
	for (candidate = crc32c_candidates; candidate->impl.crc && count < MAX_IMPLS - 1;
	     candidate++)
		if (candidate->usable())
			impls[count++] = candidate->impl;
	impls[count] = (struct kvio_crc32c_impl){"portable", kvio_crc32c_portable};
}

const struct kvio_crc32c_impl *kvio_crc32c_impls(void)
{
	return impls;
}

uint32_t kvio_crc32c(uint32_t crc, const void *data, size_t nbytes)
{
	return impls[0].crc(crc, data, nbytes);
}
