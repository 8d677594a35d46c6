/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_SYMBOLS_H
#define KVIO_SYMBOLS_H
/* Functions of a library that is opened at run time. */
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

struct kvio_symbol {
	const char *name;
	void *to;			/* the pointer that is to be filled */
	bool optional;			/* then NULL says that the library is older */
};

/* The name of the first one that is missing and not optional; NULL: all are there. */
static inline const char *kvio_resolve(void *handle, const struct kvio_symbol *symbols,
				       size_t count)
{
	for (size_t i = 0; i < count; i++) {
		void *found = dlsym(handle, symbols[i].name);

		if (!found && !symbols[i].optional)
			return symbols[i].name;
		memcpy(symbols[i].to, &found, sizeof(found));
	}
	return NULL;
}

#endif
