/* SPDX-License-Identifier: Apache-2.0 */
/* CRC-32C: the CPU's instruction where it exists (chosen once, at load), tables elsewhere. */
#include <string.h>

#include "kvio/block.h"

#if defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif

#define POLY 0x82f63b78u	/* 0x1edc6f41 reflected */

static uint32_t table[8][256];
static uint32_t (*best)(uint32_t crc, const void *data, size_t nbytes);

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

#if defined(__x86_64__)
__attribute__((target("sse4.2")))
static uint32_t crc32c_cpu(uint32_t crc, const void *data, size_t nbytes)
{
	const uint8_t *p = data;
	uint64_t c = (uint32_t)~crc, word;

	for (; nbytes >= 8; p += 8, nbytes -= 8) {
		memcpy(&word, p, 8);
		c = __builtin_ia32_crc32di(c, word);
	}
	while (nbytes--)
		c = __builtin_ia32_crc32qi((uint32_t)c, *p++);
	return ~(uint32_t)c;
}

static int have_cpu(void)
{
	__builtin_cpu_init();
	return __builtin_cpu_supports("sse4.2");
}
#elif defined(__aarch64__)
__attribute__((target("+crc")))
static uint32_t crc32c_cpu(uint32_t crc, const void *data, size_t nbytes)
{
	const uint8_t *p = data;
	uint64_t word;

	crc = ~crc;
	for (; nbytes >= 8; p += 8, nbytes -= 8) {
		memcpy(&word, p, 8);
		crc = __crc32cd(crc, word);
	}
	while (nbytes--)
		crc = __crc32cb(crc, *p++);
	return ~crc;
}

static int have_cpu(void)
{
	return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}
#else
#define crc32c_cpu kvio_crc32c_portable
static int have_cpu(void)
{
	return 0;
}
#endif

__attribute__((constructor)) static void crc32c_init(void)
{
	int n, k;

	for (n = 0; n < 256; n++) {
		uint32_t crc = (uint32_t)n;

		for (k = 0; k < 8; k++)
			crc = crc >> 1 ^ (crc & 1 ? POLY : 0);
		table[0][n] = crc;
	}
	for (n = 0; n < 256; n++)
		for (k = 1; k < 8; k++)
			table[k][n] = table[k - 1][n] >> 8 ^ table[0][table[k - 1][n] & 255];
	best = have_cpu() ? crc32c_cpu : kvio_crc32c_portable;
}

uint32_t kvio_crc32c(uint32_t crc, const void *data, size_t nbytes)
{
	return best(crc, data, nbytes);
}
