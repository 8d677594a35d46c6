/* SPDX-License-Identifier: Apache-2.0 */
/* The floor of a checksum: a loop that reads every byte and does next to nothing with it. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx512f")))
static uint64_t wide(const uint8_t *p, size_t nbytes)
{
	__m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
			  _mm512_setzero_si512()};

	for (; nbytes >= 256; p += 256, nbytes -= 256)
		for (int i = 0; i < 4; i++)
			sum[i] = _mm512_xor_si512(sum[i], _mm512_loadu_si512(p + 64 * i));
	sum[0] = _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]),
				  _mm512_xor_si512(sum[2], sum[3]));
	return (uint64_t)_mm512_reduce_add_epi64(sum[0]);
}
#endif

/* nbytes: a multiple of 256 */
uint64_t read_only(const uint8_t *p, size_t nbytes)
{
	uint64_t sum[4] = {0}, words[4];

#if defined(__x86_64__)
	if (__builtin_cpu_supports("avx512f"))
		return wide(p, nbytes);
#endif
	for (; nbytes >= 32; p += 32, nbytes -= 32) {
		memcpy(words, p, 32);
		for (int i = 0; i < 4; i++)
			sum[i] ^= words[i];
	}
	return sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
}
