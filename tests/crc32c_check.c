/* SPDX-License-Identifier: Apache-2.0 */
/* For machines other than this one, under an emulator: every implementation against the tables,
 * in a buffer of exactly the right size. Prints their names. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvio/block.h"

int main(void)
{
	static const size_t more[] = {4095, 4096, 5000, 32767, 32768, 65536, 100001};
	const struct kvio_crc32c_impl *impl;
	size_t n, i, at;

	for (impl = kvio_crc32c_impls(); impl->name; impl++) {
		for (n = 0; n < 1025 + sizeof(more) / sizeof(*more); n++) {
			size_t nbytes = n < 1025 ? n : more[n - 1025];

			for (at = 0; at < 16; at += 5) {
				uint8_t *base = malloc(at + nbytes), *data = base + at;

				for (i = 0; i < nbytes; i++)
					data[i] = (uint8_t)(i * i >> 3 ^ i * 7 ^ n);
				if (impl->crc((uint32_t)n, data, nbytes) !=
				    kvio_crc32c_portable((uint32_t)n, data, nbytes)) {
					printf("%s: %zu bytes at %zu\n", impl->name, nbytes, at);
					return 1;
				}
				free(base);
			}
		}
		printf("%s ", impl->name);
	}
	return kvio_crc32c(0, "123456789", 9) != 0xe3069283u;
}
