/* SPDX-License-Identifier: Apache-2.0 */
/*
 * BLAKE2b (RFC 7693) for block keys. hashlib has the same function, but one call per block costs
 * over 1 us in Python; a chain of 1,000 blocks must stay under 0.6 ms. The tests compare every
 * key with hashlib.
 */
#include <errno.h>
#include <string.h>

#include "kvio/block.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kvio runs on little-endian machines: ids are hashed as little-endian u32"
#endif

#define WORDS 16
#define CHUNK 128

static const uint64_t iv[8] = {
	0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
	0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static inline uint64_t rotr(uint64_t x, int n)
{
	return x >> n | x << (64 - n);
}

static inline uint64_t load64(const uint8_t *p)
{
	uint64_t x;

	memcpy(&x, p, 8);
	return x;
}

#define G(a, b, c, d, x, y) do {				\
	a += b + (x); d = rotr(d ^ a, 32);			\
	c += d;       b = rotr(b ^ c, 24);			\
	a += b + (y); d = rotr(d ^ a, 16);			\
	c += d;       b = rotr(b ^ c, 63);			\
} while (0)

/* The message schedule is spelt out: as constants it keeps m[] in registers and L1. */
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15) do {	\
	G(v[0], v[4], v[8], v[12], m[s0], m[s1]);		\
	G(v[1], v[5], v[9], v[13], m[s2], m[s3]);		\
	G(v[2], v[6], v[10], v[14], m[s4], m[s5]);		\
	G(v[3], v[7], v[11], v[15], m[s6], m[s7]);		\
	G(v[0], v[5], v[10], v[15], m[s8], m[s9]);		\
	G(v[1], v[6], v[11], v[12], m[s10], m[s11]);		\
	G(v[2], v[7], v[8], v[13], m[s12], m[s13]);		\
	G(v[3], v[4], v[9], v[14], m[s14], m[s15]);		\
} while (0)

static void compress(uint64_t h[8], const uint8_t *chunk, uint64_t total, uint64_t last)
{
	uint64_t m[WORDS], v[WORDS];
	int i;

	for (i = 0; i < WORDS; i++)
		m[i] = load64(chunk + 8 * i);
	for (i = 0; i < 8; i++) {
		v[i] = h[i];
		v[i + 8] = iv[i];
	}
	v[12] ^= total;
	v[14] ^= last;
	ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
	ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
	ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);
	ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);
	ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);
	ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);
	ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);
	ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);
	ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);
	ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);
	ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
	ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
	for (i = 0; i < 8; i++)
		h[i] ^= v[i] ^ v[i + 8];
}

void kvio_blake2b16(const void *data, size_t nbytes, const uint8_t salt[16],
		    const uint8_t person[16], uint8_t out[KVIO_KEY_BYTES])
{
	const uint8_t *p = data;
	uint8_t last[CHUNK] = { 0 };
	uint64_t h[8], total = 0;

	memcpy(h, iv, sizeof(h));
	/* Parameter block: digest length 16, no key, fanout 1, depth 1, then salt, person. */
	h[0] ^= 0x01010000 ^ KVIO_KEY_BYTES;
	h[4] ^= load64(salt);
	h[5] ^= load64(salt + 8);
	h[6] ^= load64(person);
	h[7] ^= load64(person + 8);
	/* The last chunk, even a full one, is compressed with the final flag. */
	for (; nbytes > CHUNK; p += CHUNK, nbytes -= CHUNK) {
		total += CHUNK;
		compress(h, p, total, 0);
	}
	if (nbytes)
		memcpy(last, p, nbytes);
	compress(h, last, total + nbytes, ~0ull);
	memcpy(out, h, KVIO_KEY_BYTES);
}

int64_t kvio_block_keys(const uint32_t *ids, size_t count, uint32_t block_tokens,
			const uint8_t root[KVIO_KEY_BYTES], struct kvio_key *out)
{
	static const uint8_t person[16] = "kvio-block-1";
	const uint8_t *parent = root;
	size_t i, blocks;

	if (block_tokens == 0)
		return -EINVAL;
	blocks = count / block_tokens;
	for (i = 0; i < blocks; i++) {
		memcpy(out[i].parent, parent, KVIO_KEY_BYTES);
		kvio_blake2b16(ids + i * block_tokens, 4ull * block_tokens, parent, person,
			       out[i].key);
		parent = out[i].key;
	}
	return (int64_t)blocks;
}
