/* SPDX-License-Identifier: Apache-2.0 */
/* The fake's controls: settings, counts, the log of calls, faults, costs, violations. */
#include "fake_cuda.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define MAX_FAULTS 32
#define MAX_TEXTS 32
#define LOG_ROOM 65536u

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
struct settings is;
struct device devices[MAX_DEVICES];

static const struct { const char *name, *exported; } functions[] = {
#define FUNCTION_NAME(name, exported, version) { #name, #exported },
	FUNCTIONS(FUNCTION_NAME)
};

/* The nth call of a function, or (fn < 0) the nth piece of work that runs, ends with `code`. */
struct fault { int fn, code; uint64_t after, times; bool sticky; };
struct cost { uint64_t call_ns, run_ns, piece_ns, byte_ps; };
struct entry { uint64_t fn, stream, a, b; };

static struct fault faults[MAX_FAULTS];
static struct cost costs[NUM_FUNCTIONS];
static uint64_t counts[NUM_FUNCTIONS];
static struct entry entries[LOG_ROOM];
static uint64_t num_entries;
static char texts[MAX_TEXTS][160];
static uint64_t num_violations;
static bool initialised;
static int driver_pid;

void die(const char *format, ...)
{
	va_list arguments;

	fputs("fake libcuda: ", stderr);
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	abort();
}

void violation(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	if (num_violations < MAX_TEXTS)
		vsnprintf(texts[num_violations], sizeof(texts[0]), format, arguments);
	va_end(arguments);
	num_violations++;
}

uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Short times by looking at the clock, for a sleep takes 50 us at least. */
static void spend(uint64_t ns)
{
	struct timespec nap = { 0, 0 };
	uint64_t until;

	if (!ns)
		return;
	until = now_ns() + ns;
	while (now_ns() < until) {
		uint64_t left = until - now_ns();

		if (left > 200000 && left <= ns) {
			nap.tv_sec = (time_t)((left - 100000) / 1000000000u);
			nap.tv_nsec = (long)((left - 100000) % 1000000000u);
			nanosleep(&nap, NULL);
		}
	}
}

void work_takes(enum function fn, uint64_t pieces, uint64_t nbytes)
{
	struct cost cost;

	pthread_mutex_lock(&lock);
	cost = costs[fn];
	pthread_mutex_unlock(&lock);
	spend(cost.run_ns + pieces * cost.piece_ns + nbytes * cost.byte_ps / 1000);
}

/* ---- every call of the driver ---- */

static struct fault *fault_of(int fn)
{
	for (int i = 0; i < MAX_FAULTS; i++) {
		struct fault *fault = &faults[i];

		if (!fault->times || fault->fn != fn)
			continue;
		if (fault->after) {
			fault->after--;
			continue;
		}
		fault->times--;
		return fault;
	}
	return NULL;
}

bool run_fails(CUcontext context)
{
	struct fault *fault = fault_of(-1);

	if (fault)
		context_died(context, (CUresult)fault->code);
	return context->sticky != CUDA_SUCCESS;
}

static CUresult refusal(enum function fn, enum needs needs)
{
	CUcontext context = current_context();
	struct fault *fault;

	if (needs != NOTHING && (!initialised || is.uninitialised))
		return CUDA_ERROR_NOT_INITIALIZED;
	fault = fault_of((int)fn);
	if (fault && fault->sticky && context)
		context_died(context, (CUresult)fault->code);
	if (fault && fault->sticky && context)
		context_stops(context);
	if (fault)
		return (CUresult)fault->code;
	if (needs != CONTEXT)
		return CUDA_SUCCESS;
	if (!context)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!is_context(context))
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	if (context->sticky)
		context_stops(context);
	return context->sticky;
}

CUresult enter(enum function fn, enum needs needs, CUstream stream, uint64_t a, uint64_t b)
{
	CUresult rc;

	if (initialised && getpid() != driver_pid) {	/* a forked child, without our threads */
		__atomic_fetch_add(&counts[fn], 1, __ATOMIC_RELAXED);
		return CUDA_ERROR_NOT_INITIALIZED;
	}
	spend(__atomic_load_n(&costs[fn].call_ns, __ATOMIC_RELAXED));
	pthread_mutex_lock(&lock);
	__atomic_fetch_add(&counts[fn], 1, __ATOMIC_RELAXED);
	if (in_host_function) {
		violation("%s was called in a host function", functions[fn].exported);
		return leave(CUDA_ERROR_NOT_PERMITTED);
	}
	if (num_entries < LOG_ROOM)
		entries[num_entries] = (struct entry){ fn, (uint64_t)(uintptr_t)stream, a, b };
	num_entries++;
	rc = refusal(fn, needs);
	if (rc)
		return leave(rc);
	return CUDA_SUCCESS;
}

CUresult leave(CUresult rc)
{
	pthread_mutex_unlock(&lock);
	return rc;
}

CUresult cuInit(unsigned int flags)
{
	ENTER(cuInit, NOTHING, NULL, flags, 0);
	if (flags)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (!is.devices)
		return leave(CUDA_ERROR_NO_DEVICE);
	initialised = true;
	driver_pid = getpid();
	return leave(CUDA_SUCCESS);
}

/* ---- controls, by name; -1 or UINT64_MAX: there is no such name ---- */

static const struct { const char *name; size_t at; uint64_t value; } settings[] = {
#define SETTING_ROW(name, value) { #name, offsetof(struct settings, name), value },
	SETTINGS(SETTING_ROW)
};

static int function_of(const char *exported)
{
	for (int fn = 0; fn < NUM_FUNCTIONS; fn++)
		if (!strcmp(functions[fn].exported, exported))
			return fn;
	return -1;
}

EXPORT int fake_cuda_set(const char *name, uint64_t value)
{
	for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
		if (strcmp(settings[i].name, name))
			continue;
		pthread_mutex_lock(&lock);
		*(uint64_t *)((char *)&is + settings[i].at) = value;
		if (is.devices > MAX_DEVICES)
			die("at most %d devices", MAX_DEVICES);
		pthread_mutex_unlock(&lock);
		return 0;
	}
	return -1;
}

static void settings_from(const char *text)
{
	char name[32];
	long long value;
	int used;

	while (text && sscanf(text, "%31[a-z_]=%lli%n", name, &value, &used) == 2) {
		if (fake_cuda_set(name, (uint64_t)value))
			die("KVIO_FAKE_CUDA: there is no setting %s", name);
		text += used;
		text += *text == ',';
	}
	if (text && *text)
		die("KVIO_FAKE_CUDA: not name=value: %s", text);
}

/* As at the start: settings (those of the environment too), no faults, costs, counts, log, held
 * streams or violations. What was made with the driver stays. */
EXPORT void fake_cuda_reset(void)
{
	for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++)
		fake_cuda_set(settings[i].name, settings[i].value);
	settings_from(getenv("KVIO_FAKE_CUDA"));
	pthread_mutex_lock(&lock);
	memset(faults, 0, sizeof(faults));
	for (int fn = 0; fn < NUM_FUNCTIONS; fn++) {
		__atomic_store_n(&costs[fn].call_ns, 0, __ATOMIC_RELAXED);
		costs[fn].run_ns = costs[fn].piece_ns = costs[fn].byte_ps = 0;
		__atomic_store_n(&counts[fn], 0, __ATOMIC_RELAXED);
	}
	num_entries = num_violations = 0;
	exports_reset();
	streams_wake();
	pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void loaded(void)
{
	fake_cuda_reset();
}

/* Calls of an exported function; UINT64_MAX: there is none of this name. */
EXPORT uint64_t fake_cuda_calls(const char *exported)
{
	int fn = function_of(exported);

	return fn < 0 ? UINT64_MAX : __atomic_load_n(&counts[fn], __ATOMIC_RELAXED);
}

/* What there is of one kind now. */
EXPORT uint64_t fake_cuda_objects(const char *kind)
{
	uint64_t found = UINT64_MAX;

	pthread_mutex_lock(&lock);
	if (!strcmp(kind, "contexts"))
		found = num_contexts();
	else if (!strcmp(kind, "streams"))
		found = num_streams();
	else if (!strcmp(kind, "events"))
		found = num_events();
	else if (!strcmp(kind, "allocations"))
		found = num_memories(DEVICE_MEMORY);
	else if (!strcmp(kind, "pinned"))
		found = num_memories(PINNED);
	else if (!strcmp(kind, "registered"))
		found = num_memories(REGISTERED);
	else if (!strcmp(kind, "modules"))
		found = num_modules();
	pthread_mutex_unlock(&lock);
	return found;
}

/* `after` calls of this function from now, `times` of them answer `code`; "": the work that runs,
 * whose error is sticky. */
EXPORT int fake_cuda_fail(const char *exported, int code, uint64_t after, uint64_t times,
			  int sticky)
{
	int fn = *exported ? function_of(exported) : -1, rc = -1;

	if (*exported && fn < 0)
		return -1;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < MAX_FAULTS && rc; i++) {
		if (faults[i].times)
			continue;
		faults[i] = (struct fault){ fn, code, after, times, sticky };
		rc = 0;
	}
	pthread_mutex_unlock(&lock);
	return rc;
}

/* A call takes call_ns more; its work, when it runs, the others. */
EXPORT int fake_cuda_cost(const char *exported, uint64_t call_ns, uint64_t run_ns,
			  uint64_t piece_ns, uint64_t byte_ps)
{
	int fn = function_of(exported);

	if (fn < 0)
		return -1;
	pthread_mutex_lock(&lock);
	__atomic_store_n(&costs[fn].call_ns, call_ns, __ATOMIC_RELAXED);
	costs[fn].run_ns = run_ns;
	costs[fn].piece_ns = piece_ns;
	costs[fn].byte_ps = byte_ps;
	pthread_mutex_unlock(&lock);
	return 0;
}

EXPORT uint64_t fake_cuda_violations(void)
{
	uint64_t count;

	pthread_mutex_lock(&lock);
	count = num_violations;
	pthread_mutex_unlock(&lock);
	return count;
}

EXPORT const char *fake_cuda_violation(uint64_t index)
{
	return index < MAX_TEXTS ? texts[index] : "and more";
}

EXPORT void fake_cuda_forgive(void)
{
	pthread_mutex_lock(&lock);
	num_violations = 0;
	pthread_mutex_unlock(&lock);
}

/* How many calls were made since the reset; the first `room` of them from `start`, four words
 * each. */
EXPORT uint64_t fake_cuda_log(struct entry *out, uint64_t start, uint64_t room)
{
	uint64_t count;

	pthread_mutex_lock(&lock);
	count = num_entries;
	for (uint64_t i = start; i < count && i < LOG_ROOM && i - start < room; i++)
		out[i - start] = entries[i];
	pthread_mutex_unlock(&lock);
	return count;
}

EXPORT const char *fake_cuda_name(uint64_t fn)
{
	return fn < NUM_FUNCTIONS ? functions[fn].exported : NULL;
}
