/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_BLOCK_H
#define KVIO_BLOCK_H
/*
 * Keys, checksums and work requests: what the store and the NICs share.
 * Every int result is >= 0, or -errno. Nothing here calls into Python, allocates or blocks.
 */
#include <stddef.h>
#include <stdint.h>

#define KVIO_KEY_BYTES 16

/* One row per full block: its own key and the key of the block before it. */
struct kvio_key {
	uint8_t key[KVIO_KEY_BYTES];
	uint8_t parent[KVIO_KEY_BYTES];
};

/*
 * BLAKE2b (RFC 7693), unkeyed, digest of 16 bytes, with salt and personalisation.
 * salt and person are 16 bytes each.
 */
void kvio_blake2b16(const void *data, size_t nbytes, const uint8_t salt[16],
		    const uint8_t person[16], uint8_t out[KVIO_KEY_BYTES]);

/*
 * Chained keys of the full blocks of a token sequence:
 * key[i] = BLAKE2b-128(ids of block i as little-endian u32, salt = key[i-1], "kvio-block-1").
 * root is the parent of block 0. Writes count / block_tokens rows and returns that number.
 */
int64_t kvio_block_keys(const uint32_t *ids, size_t count, uint32_t block_tokens,
			const uint8_t root[KVIO_KEY_BYTES], struct kvio_key *out);

/* CRC-32C (Castagnoli), `crc` 0 to start; by the CPU's instructions where it has them. */
uint32_t kvio_crc32c(uint32_t crc, const void *data, size_t nbytes);
/* The portable version, for machines without them and for the tests. */
uint32_t kvio_crc32c_portable(uint32_t crc, const void *data, size_t nbytes);

/* For tests and benchmarks: all that this machine can run, the one in use first, the portable
 * one last, then one whose name is NULL. */
struct kvio_crc32c_impl {
	const char *name;
	uint32_t (*crc)(uint32_t crc, const void *data, size_t nbytes);
};
const struct kvio_crc32c_impl *kvio_crc32c_impls(void);

enum kvio_opcode {
	KVIO_OP_READ = 1,	/* remote -> local */
	KVIO_OP_WRITE = 2,	/* local -> remote */
};

/* One entry of a gather (WRITE) or scatter (READ) list on the local side. */
struct kvio_sge {
	uint64_t addr;
	uint64_t lkey;
	uint32_t length;
	uint32_t reserved;
};

/*
 * A work request, 64 bytes. Keys are kvio's own region keys (index and a generation that is
 * never repeated); the provider resolves them at post. With num_sge 0 the local side is
 * local_addr/lkey; otherwise it is sges[sge_first .. sge_first + num_sge) of the same post and
 * `length` is their sum.
 */
struct kvio_wr {
	uint64_t wr_id;		/* returned untouched with the completion */
	uint64_t local_addr;
	uint64_t remote_addr;
	uint64_t lkey;
	uint64_t rkey;
	uint32_t length;	/* bytes */
	uint32_t opcode;	/* enum kvio_opcode */
	uint32_t sge_first;
	uint32_t num_sge;
	uint64_t reserved;
};

/* Where blocks lie: block b of the layer at layer_offset starts at base + b * block_stride +
 * layer_offset. block_ids NULL: blocks 0, 1, 2, ... in order. */
struct kvio_side {
	uint64_t base;
	uint64_t block_stride;
	uint64_t layer_offset;
	uint64_t key;		/* region key: lkey on the local side, rkey on the remote one */
	const int64_t *block_ids;
};

/*
 * Descriptors of one Layer Block of each of `count` blocks. The last block may be partial:
 * it moves tail_nbytes (== nbytes when it is full). Neighbours that touch on both sides are
 * merged up to max_length bytes. Returns how many work requests were written (<= count).
 */
int64_t kvio_describe(struct kvio_wr *out, uint32_t opcode, const struct kvio_side *local,
		      const struct kvio_side *remote, size_t count, uint32_t nbytes,
		      uint32_t tail_nbytes, uint32_t max_length);

/*
 * Neighbours that touch on the remote side become one work request with a list of up to max_sge
 * entries, in place, up to max_length bytes: fewer requests where only the local side is scattered.
 * `sges` has room for `count`. Returns how many work requests are left; *num_sges is written.
 */
int64_t kvio_gather(struct kvio_wr *wrs, size_t count, struct kvio_sge *sges, uint32_t max_sge,
		    uint32_t max_length, size_t *num_sges);

_Static_assert(sizeof(struct kvio_key) == 32, "the numpy dtype says 32");
_Static_assert(sizeof(struct kvio_sge) == 24, "the numpy dtype says 24");
_Static_assert(sizeof(struct kvio_wr) == 64, "one cache line");

#endif
