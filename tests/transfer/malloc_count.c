/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded: counts what one library asks of malloc, by the addresses that its calls return to.
 * For tests of what must not allocate; see test_cuda_hot_path.py.
 */
#include <stdatomic.h>
#include <stdint.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

/* glibc's own, which need no dlsym: that would allocate. */
void *__libc_malloc(size_t nbytes);
void *__libc_calloc(size_t count, size_t nbytes);
void *__libc_realloc(void *old, size_t nbytes);

static _Atomic uintptr_t from, to;
static _Atomic uint64_t calls;

static void note(const void *caller)
{
	if ((uintptr_t)caller >= from && (uintptr_t)caller < to)
		calls++;
}

/* The code whose calls are counted from now on. */
EXPORT void malloc_count_of(uint64_t begin, uint64_t end)
{
	from = begin;
	to = end;
	calls = 0;
}

EXPORT uint64_t malloc_count(void)
{
	return calls;
}

EXPORT void *malloc(size_t nbytes)
{
	note(__builtin_return_address(0));
	return __libc_malloc(nbytes);
}

EXPORT void *calloc(size_t count, size_t nbytes)
{
	note(__builtin_return_address(0));
	return __libc_calloc(count, nbytes);
}

EXPORT void *realloc(void *old, size_t nbytes)
{
	note(__builtin_return_address(0));
	return __libc_realloc(old, nbytes);
}
