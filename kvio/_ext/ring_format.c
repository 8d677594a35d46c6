// SPDX-License-Identifier: Apache-2.0
/* Headers and page 1 of a segment, byte for byte as in docs/format.md. */
#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "kvio/block.h"
#include "kvio/ring.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian");

#define FORMAT_VERSION 1u
#define PAGE_CRC_AT (KVIO_PAGE - 4)
#define HEADER_DURABLE 1u

struct header {
	char magic[4];
	uint32_t version;
	uint8_t segment[16];
	uint8_t key[16];
	uint8_t parent[16];
	uint64_t generation;
	uint64_t nbytes;
	uint32_t slot;
	uint32_t tokens;
	uint32_t payload_crc;
	uint32_t flags;
	uint8_t reserved[36];
	uint32_t crc;
};
_Static_assert(sizeof(struct header) == KVIO_HEADER_BYTES, "docs/format.md, Block headers");

void kvio_header_encode(uint8_t *out, const struct kvio_block_io *block, const uint8_t *uuid,
			uint64_t nbytes)
{
	struct header header = {
		.magic = { 'K', 'V', 'B', 'H' }, .version = FORMAT_VERSION,
		.generation = block->generation, .nbytes = nbytes, .slot = block->slot,
		.tokens = block->tokens, .payload_crc = block->crc,
		.flags = block->flags & KVIO_BLOCK_DURABLE ? HEADER_DURABLE : 0,
	};

	memcpy(header.segment, uuid, 16);
	memcpy(header.key, block->key, 16);
	memcpy(header.parent, block->parent, 16);
	header.crc = kvio_crc32c(0, &header, sizeof(header) - 4);
	memcpy(out, &header, sizeof(header));
}

static bool is_empty(const uint8_t *header)
{
	static const uint8_t zeros[KVIO_HEADER_BYTES];

	return memcmp(header, zeros, sizeof(zeros)) == 0;
}

int kvio_header_decode(const uint8_t *bytes, const uint8_t *uuid, uint32_t slot,
		       uint64_t nbytes, struct kvio_block_io *out)
{
	struct header header;

	memcpy(&header, bytes, sizeof(header));
	if (memcmp(header.magic, "KVBH", 4))
		return is_empty(bytes) ? 0 : -EBADMSG;
	if (header.crc != kvio_crc32c(0, &header, sizeof(header) - 4) ||
	    header.version != FORMAT_VERSION || memcmp(header.segment, uuid, 16) ||
	    header.slot != slot || header.nbytes != nbytes || header.generation == 0)
		return -EBADMSG;
	memset(out, 0, sizeof(*out));
	out->generation = header.generation;
	out->slot = slot;
	out->tokens = header.tokens;
	out->crc = header.payload_crc;
	out->flags = header.flags & HEADER_DURABLE ? KVIO_BLOCK_DURABLE : 0;
	memcpy(out->key, header.key, 16);
	memcpy(out->parent, header.parent, 16);
	return 1;
}

int64_t kvio_headers_scan(const uint8_t *headers, uint32_t count, const uint8_t *uuid,
			  uint64_t nbytes, struct kvio_block_io *out, uint32_t *damaged)
{
	int64_t found = 0;

	*damaged = 0;
	for (uint32_t slot = 0; slot < count; slot++) {
		int rc = kvio_header_decode(headers + (size_t)slot * KVIO_HEADER_BYTES, uuid, slot,
					    nbytes, &out[found]);

		if (rc == 1)
			found++;
		else if (rc < 0)
			++*damaged;
	}
	return found;
}

void kvio_page1_encode(uint8_t *out, const struct kvio_page1 *page)
{
	uint32_t version = FORMAT_VERSION, crc;

	memset(out, 0, KVIO_PAGE);
	memcpy(out, "KVIOPG1", 8);
	memcpy(out + 8, &version, 4);
	memcpy(out + 12, &page->header_pages, 4);
	memcpy(out + 16, page->uuid, 16);
	memcpy(out + 32, &page->heartbeat, 8);
	memcpy(out + 40, &page->epoch, 8);
	memcpy(out + 48, &page->others, 8);
	memcpy(out + 128, page->changed, KVIO_BITMAP_BYTES);
	memcpy(out + 2048, page->changed_before, KVIO_BITMAP_BYTES);
	crc = kvio_crc32c(0, out, PAGE_CRC_AT);
	memcpy(out + PAGE_CRC_AT, &crc, 4);
}

int kvio_page1_decode(const uint8_t *bytes, const uint8_t *uuid, uint32_t header_pages,
		      struct kvio_page1 *out)
{
	uint32_t version, crc;

	memcpy(&version, bytes + 8, 4);
	memcpy(&out->header_pages, bytes + 12, 4);
	memcpy(out->uuid, bytes + 16, 16);
	memcpy(&out->heartbeat, bytes + 32, 8);
	memcpy(&out->epoch, bytes + 40, 8);
	memcpy(&out->others, bytes + 48, 8);
	memcpy(out->changed, bytes + 128, KVIO_BITMAP_BYTES);
	memcpy(out->changed_before, bytes + 2048, KVIO_BITMAP_BYTES);
	memcpy(&crc, bytes + PAGE_CRC_AT, 4);
	if (memcmp(bytes, "KVIOPG1", 8) || version != FORMAT_VERSION ||
	    out->header_pages != header_pages || memcmp(out->uuid, uuid, 16) ||
	    crc != kvio_crc32c(0, bytes, PAGE_CRC_AT))
		return -EBADMSG;
	return 0;
}
