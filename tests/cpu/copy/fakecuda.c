/* SPDX-License-Identifier: Apache-2.0
 *
 * CUDA's driver without a device, as asynchronous and as unordered as CUDA allows, so that a missing wait shows as wrong
 * bytes. A stream is a thread with a queue. Device memory is host memory: what cuMemAlloc gave, and what a test adopted.
 *
 *   order      Streams go on independently, with pauses drawn from a seed. The copies of one batch run in random order,
 *              each in two halves. A source of order ANY may be read during the call.
 *   host       Registered memory is copied as the stream comes to it. A source that is not registered is read during the
 *              call, and a copy to such memory returns when it has ended: the caller waits.
 *   borders    No copy starts in one registration or allocation and ends outside. No two registrations share a page.
 *   queue      A stream takes so many operations; a call that brings one more waits until one has ended. What a thread
 *              pays that a test marked as the engine's is counted: its copies, and its waits.
 *   limits     A batch of more copies than the driver takes fails. A device with other addresses for registered memory
 *              than the host breaks when a batch names it.
 *   errors     A call fails when a test says so, and an illegal address breaks the device. A broken device fails all calls from then on, and runs nothing.
 *   contexts   A thread without a current context gets an error. Streams and events belong to the context that was
 *              current when they were created; a stream does not record another context's event.
 *   captures   While one thread captures a graph in the default mode, a call of another thread that CUDA calls unsafe
 *              fails and invalidates the capture, unless that thread chose the relaxed mode.
 *   faults     What CUDA leaves undefined is counted: memory that goes away under a copy, a batch that writes a byte
 *              twice, a handle after its end.
 *
 * Functions that begin with "fake_" are the test's. All others are compiled against NVIDIA's cuda.h, which checks them.
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cudaTypedefs.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { PAGE = 4096, ALIVE = 0x600DCA7, ORDER_STREAM = 1, ORDER_DURING_CALL = 2, ORDER_ANY = 3 };

typedef struct Event {
    int alive, users; /* users: ops in queues */
    unsigned flags;
    uint64_t recorded, done; /* how often */
    double at_ms;
    CUcontext context;
} Event;

typedef struct Copy {
    char *to, *from;
    char *early; /* the source as it was during the call, or NULL */
    size_t size;
} Copy;

typedef enum { COPY, FILL, RECORD, WAIT } Kind;

typedef struct Op {
    Kind kind;
    struct Op *next;
    Event *event;
    uint64_t generation; /* of the event: what this op records or waits for */
    Copy *copies;
    size_t count;
    unsigned char value;
} Op;

typedef struct Stream {
    int alive, is_held, is_busy, is_closing;
    size_t longest_queue; /* 0: any */
    pthread_t thread;
    pthread_cond_t may_go_on;
    Op *head, *tail;
    uint64_t random;
    CUcontext context;
    struct Stream *next;
} Stream;

typedef struct Range {
    uintptr_t low, high;
    struct Range *next;
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream *streams, *null_stream;
static Range *device_memory, *registered;
static uint64_t seed = 1;
static long longest_pause_us, faults;
static size_t largest_registration = SIZE_MAX, most_registered = SIZE_MAX, total_registered;
static int driver_version = 13000, broken;
static struct { char call[64]; int code; long after, times; } failing;
static struct { long batches, copies, pageable, registrations, engine_copies, engine_waits, fills, narrow_registrations; } counts;
static size_t largest_batch = SIZE_MAX;
static int has_one_address = 1, holds_new_streams;
enum { MOST_DEVICES = 2, DEEPEST = 16 };
static char contexts[MOST_DEVICES];
static int num_devices = 1;
static __thread CUcontext current, stack[DEEPEST];
static __thread int depth;
static __thread int is_engine;
static __thread CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static __thread int captures_here;
static int is_capturing;
static long invalidated;

/* ------------------------------------------------------------------------------------------------ small parts */

static void fault(const char *what) {
    faults++;
    fprintf(stderr, "fakecuda: %s\n", what);
}

static uint64_t draw(uint64_t *state) { /* xorshift */
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static void pause_a_while(Stream *stream) {
    if (longest_pause_us) usleep((useconds_t)(draw(&stream->random) % (uint64_t)longest_pause_us));
}

static void add(Range **list, uintptr_t low, size_t size) {
    Range *range = malloc(sizeof *range);
    *range = (Range){low, low + size, *list};
    *list = range;
}

static size_t take_out(Range **list, uintptr_t low) { /* its size, or 0 */
    for (; *list; list = &(*list)->next) {
        if ((*list)->low != low) continue;
        Range *range = *list;
        size_t size = range->high - low;
        *list = range->next;
        free(range);
        return size;
    }
    return 0;
}

static int touches(const Range *range, uintptr_t low, uintptr_t high) {
    for (; range; range = range->next)
        if (low < range->high && high > range->low) return 1;
    return 0;
}

static int holds(const Range *range, uintptr_t low, uintptr_t high) {
    for (; range; range = range->next)
        if (low >= range->low && high <= range->high) return 1;
    return 0;
}

typedef enum { PAGEABLE, KNOWN, ACROSS } Place;

static Place place_of(const char *address, size_t size) {
    uintptr_t low = (uintptr_t)address, high = low + size;
    if (holds(device_memory, low, high) || holds(registered, low, high)) return KNOWN;
    return touches(device_memory, low, high) || touches(registered, low, high) ? ACROSS : PAGEABLE;
}

static int is_in_flight(uintptr_t low, uintptr_t high) {
    Range range = {low, high, NULL};
    for (Stream *stream = streams; stream; stream = stream->next)
        for (Op *op = stream->head; op; op = op->next)
            for (size_t i = 0; i < op->count; i++) {
                uintptr_t to = (uintptr_t)op->copies[i].to, from = (uintptr_t)op->copies[i].from;
                if (touches(&range, to, to + op->copies[i].size)) return 1;
                if (from && !op->copies[i].early && touches(&range, from, from + op->copies[i].size)) return 1;
            }
    return 0;
}

static int can_go_on(void); /* any stream */

/* A copy of memory that is about to go. The caller gets to know, and the process lives on. */
static void outlive_copies(uintptr_t low, uintptr_t high, const char *what) {
    if (is_in_flight(low, high)) fault(what);
    while (is_in_flight(low, high) && can_go_on()) pthread_cond_wait(&changed, &lock);
}

/* Every call begins so: with the lock held, a context, and no error that is due. */
static CUresult begin_without_context(const char *call) {
    pthread_mutex_lock(&lock);
    if (broken) return (CUresult)broken;
    if (failing.code && !strcmp(failing.call, call) && failing.after-- <= 0) {
        int code = failing.code;
        if (--failing.times <= 0) failing.code = 0;
        if (code == CUDA_ERROR_ILLEGAL_ADDRESS) broken = code; /* sticky: all calls fail from now on */
        return (CUresult)code;
    }
    return CUDA_SUCCESS;
}

static CUresult begin(const char *call) {
    CUresult code = begin_without_context(call);
    return code || current ? code : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult end(CUresult code) {
    pthread_mutex_unlock(&lock);
    return code;
}

#define BEGIN(call) do { CUresult code_ = begin(call); if (code_) return end(code_); } while (0)

static CUresult begin_unsafe(const char *call) {
    CUresult code = begin(call);
    if (code || !is_capturing || captures_here || capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return code;
    invalidated++;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

#define BEGIN_UNSAFE(call) do { CUresult code_ = begin_unsafe(call); if (code_) return end(code_); } while (0)

/* ---------------------------------------------------------------------------------------------------- streams */

static int is_blocked(const Stream *stream) { /* until something else happens */
    if (stream->is_held || !stream->head) return 1;
    return !broken && stream->head->kind == WAIT && stream->head->event->done < stream->head->generation;
}

static int can_go_on(void) {
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->is_busy || !is_blocked(stream)) return 1;
    return 0;
}

/* Something has changed: whoever waits for the device looks, and of the streams those alone that can go on. */
static void tell(void) {
    pthread_cond_broadcast(&changed);
    for (Stream *stream = streams; stream; stream = stream->next)
        if (!stream->is_busy && (stream->is_closing || !is_blocked(stream))) pthread_cond_signal(&stream->may_go_on);
}

static void let_go(Event *event) {
    event->users--;
    if (!event->alive && !event->users) free(event);
}

static void copy_half(const Copy *copy, int is_second) {
    size_t middle = copy->size / 2, from = is_second ? middle : 0, to = is_second ? copy->size : middle;
    memcpy(copy->to + from, (copy->early ? copy->early : copy->from) + from, to - from);
}

static void run_copies(Stream *stream, const Op *op) {
    size_t num_halves = 2 * op->count;
    size_t *order = malloc(num_halves * sizeof *order);
    for (size_t i = 0; i < num_halves; i++) {
        size_t other = draw(&stream->random) % (i + 1);
        order[i] = order[other];
        order[other] = i;
    }
    for (size_t i = 0; i < num_halves; i++) {
        if (draw(&stream->random) % 32 == 0) pause_a_while(stream);
        copy_half(&op->copies[order[i] / 2], (int)(order[i] % 2));
    }
    free(order);
}

static void *run(void *argument) {
    Stream *stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (is_blocked(stream) && !(stream->is_closing && !stream->head)) pthread_cond_wait(&stream->may_go_on, &lock);
        Op *op = stream->head;
        if (!op) break;
        stream->is_busy = 1;
        if (!broken && (op->kind == COPY || op->kind == FILL)) {
            pthread_mutex_unlock(&lock);
            pause_a_while(stream);
            if (op->kind == COPY) run_copies(stream, op);
            else memset(op->copies->to, op->value, op->copies->size);
            pthread_mutex_lock(&lock);
        }
        if (!broken && op->kind == RECORD) {
            if (op->generation > op->event->done) op->event->done = op->generation;
            op->event->at_ms = now_ms();
        }
        if (op->event) let_go(op->event);
        for (size_t i = 0; i < op->count; i++) free(op->copies[i].early);
        free(op->copies);
        stream->head = op->next;
        if (!stream->head) stream->tail = NULL;
        stream->is_busy = 0;
        free(op);
        tell();
    }
    for (Stream **each = &streams; *each; each = &(*each)->next)
        if (*each == stream) {
            *each = stream->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    return NULL; /* the handle stays, so that its use after the end is seen */
}

static Stream *make_stream(void) {
    Stream *stream = calloc(1, sizeof *stream);
    stream->alive = ALIVE;
    stream->is_held = holds_new_streams;
    stream->context = current;
    stream->random = draw(&seed) | 1;
    pthread_cond_init(&stream->may_go_on, NULL);
    stream->next = streams;
    streams = stream;
    pthread_create(&stream->thread, NULL, run, stream);
    pthread_detach(stream->thread);
    return stream;
}

static Stream *stream_of(CUstream handle) {
    if (!handle) return null_stream ? null_stream : (null_stream = make_stream());
    Stream *stream = (Stream *)handle;
    if (stream->alive == ALIVE) return stream;
    fault("a stream is used after its end");
    return NULL;
}

static Event *event_of(CUevent handle) {
    Event *event = (Event *)handle;
    if (event && event->alive == ALIVE) return event;
    fault("an event is used after its end");
    return NULL;
}

static size_t length_of_queue(const Stream *stream) {
    size_t length = 0;
    for (const Op *op = stream->head; op; op = op->next) length++;
    return length;
}

static void push(Stream *stream, Op op) {
    if (stream->longest_queue && length_of_queue(stream) >= stream->longest_queue) {
        counts.engine_waits += is_engine;
        while (!broken && length_of_queue(stream) >= stream->longest_queue) pthread_cond_wait(&changed, &lock);
    }
    Op *kept = malloc(sizeof *kept);
    *kept = op;
    if (op.event) op.event->users++;
    if (stream->tail) stream->tail->next = kept;
    else stream->head = kept;
    stream->tail = kept;
    tell();
}

static CUresult drain(Stream *stream) {
    if (stream->head || stream->is_busy) counts.engine_waits += is_engine;
    while (!broken && (stream->head || stream->is_busy)) pthread_cond_wait(&changed, &lock);
    return (CUresult)broken;
}

/* ----------------------------------------------------------------------------------------------------- copies */

static int by_destination(const void *left, const void *right) {
    const Copy *a = left, *b = right;
    return a->to < b->to ? -1 : a->to > b->to;
}

static CUresult enqueue(CUstream handle, Copy *copies, size_t count, int order, size_t *failed) {
    Stream *stream = stream_of(handle);
    int is_to_pageable = 0;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    for (size_t i = 0; i < count; i++) {
        Place to = place_of(copies[i].to, copies[i].size), from = place_of(copies[i].from, copies[i].size);
        if (to == ACROSS || from == ACROSS || !copies[i].size) {
            if (failed) *failed = i;
            for (size_t j = 0; j < i; j++) free(copies[j].early);
            free(copies);
            return CUDA_ERROR_INVALID_VALUE;
        }
        counts.pageable += (to == PAGEABLE) + (from == PAGEABLE);
        is_to_pageable |= to == PAGEABLE;
        int is_early = from == PAGEABLE || order == ORDER_DURING_CALL || (order == ORDER_ANY && draw(&seed) % 2);
        if (is_early) copies[i].early = memcpy(malloc(copies[i].size), copies[i].from, copies[i].size);
    }
    qsort(copies, count, sizeof *copies, by_destination);
    for (size_t i = 1; i < count; i++)
        if (copies[i].to < copies[i - 1].to + copies[i - 1].size) {
            fault("two copies of a batch write the same byte");
            break;
        }
    counts.copies += (long)count;
    counts.engine_copies += is_engine ? (long)count : 0;
    push(stream, (Op){.kind = COPY, .copies = copies, .count = count});
    return is_to_pageable ? drain(stream) : CUDA_SUCCESS;
}

static CUresult enqueue_one(CUstream stream, CUdeviceptr to, CUdeviceptr from, size_t size) {
    Copy *copy = calloc(1, sizeof *copy);
    *copy = (Copy){(char *)to, (char *)from, NULL, size};
    return enqueue(stream, copy, 1, ORDER_STREAM, NULL);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    BEGIN("cuMemcpyAsync");
    return end(enqueue_one(stream, to, from, size));
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    BEGIN("cuMemcpyDtoDAsync");
    return end(enqueue_one(stream, to, from, size));
}

EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                                   CUmemcpyAttributes_v1 *attributes, size_t *first, size_t num_attributes,
                                   size_t *failed, CUstream stream) {
    BEGIN("cuMemcpyBatchAsync");
    int order = num_attributes == 1 ? (int)attributes->srcAccessOrder : 0;
    if (!stream || !count || num_attributes != 1 || *first || order < ORDER_STREAM || order > ORDER_ANY)
        return end(CUDA_ERROR_INVALID_VALUE);
    if (count > largest_batch) return end(CUDA_ERROR_UNKNOWN);
    for (size_t i = 0; i < count && !has_one_address; i++)
        if (touches(registered, from[i], from[i] + 1) || touches(registered, to[i], to[i] + 1))
            return end((CUresult)(broken = CUDA_ERROR_ILLEGAL_ADDRESS));
    Copy *copies = calloc(count, sizeof *copies);
    for (size_t i = 0; i < count; i++) copies[i] = (Copy){(char *)to[i], (char *)from[i], NULL, sizes[i]};
    counts.batches++;
    return end(enqueue(stream, copies, count, order, failed));
}

EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                                      CUmemcpyAttributes_v1 *attributes, size_t *first, size_t num_attributes,
                                      CUstream stream) {
    return cuMemcpyBatchAsync(to, from, sizes, count, attributes, first, num_attributes, NULL, stream);
}

static CUresult set(CUstream handle, CUdeviceptr to, unsigned char value, size_t size) {
    Stream *stream = stream_of(handle);
    if (!stream || place_of((char *)to, size) != KNOWN) return CUDA_ERROR_INVALID_VALUE;
    Copy *copy = calloc(1, sizeof *copy);
    *copy = (Copy){(char *)to, NULL, NULL, size};
    counts.fills++;
    push(stream, (Op){.kind = FILL, .copies = copy, .count = 1, .value = value});
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream stream) {
    BEGIN("cuMemsetD8Async");
    return end(set(stream, to, value, size));
}

/* Of a value whose four bytes are equal. */
EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr to, cuuint32_t value, unsigned flags) {
    BEGIN("cuStreamWriteValue32");
    return end(flags ? CUDA_ERROR_INVALID_VALUE : set(stream, to, (unsigned char)value, sizeof value));
}

/* ----------------------------------------------------------------------------------------------------- memory */

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    BEGIN_UNSAFE("cuMemAlloc");
    void *memory = aligned_alloc(512, (size + 511) / 512 * 512);
    memset(memory, 0xCD, size);
    add(&device_memory, (uintptr_t)memory, size);
    *address = (CUdeviceptr)memory;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    BEGIN_UNSAFE("cuMemFree");
    size_t size = take_out(&device_memory, address);
    outlive_copies(address, address + size, "device memory is freed under a copy");
    free(size ? (void *)address : NULL);
    return end(size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    BEGIN_UNSAFE("cuMemHostRegister");
    uintptr_t low = (uintptr_t)address / PAGE * PAGE, high = ((uintptr_t)address + size + PAGE - 1) / PAGE * PAGE;
    if (flags & ~7u || !size) return end(CUDA_ERROR_INVALID_VALUE);
    counts.registrations++;
    counts.narrow_registrations += (flags & 3) != (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if (size > largest_registration || total_registered + size > most_registered) return end(CUDA_ERROR_OUT_OF_MEMORY);
    if (touches(registered, low, high)) return end(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    add(&registered, (uintptr_t)address, size);
    total_registered += size;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult cuMemHostUnregister(void *address) {
    BEGIN_UNSAFE("cuMemHostUnregister");
    size_t size = take_out(&registered, (uintptr_t)address);
    if (!size) return end(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    outlive_copies((uintptr_t)address, (uintptr_t)address + size, "host memory is unregistered under a copy");
    total_registered -= size;
    return end(CUDA_SUCCESS);
}

/* ------------------------------------------------------------------------------------- streams and events: API */

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    BEGIN("cuStreamCreateWithPriority");
    (void)priority;
    if (flags & ~1u) return end(CUDA_ERROR_INVALID_VALUE);
    *stream = (CUstream)make_stream();
    return end(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
    BEGIN("cuStreamDestroy");
    Stream *stream = handle ? stream_of(handle) : NULL;
    if (!stream) return end(CUDA_ERROR_INVALID_HANDLE);
    stream->alive = 0;
    stream->is_closing = 1;
    tell();
    return end(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamQuery(CUstream handle) {
    BEGIN_UNSAFE("cuStreamQuery");
    Stream *stream = stream_of(handle);
    if (!stream) return end(CUDA_ERROR_INVALID_HANDLE);
    return end(stream->head ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    BEGIN_UNSAFE("cuStreamSynchronize");
    Stream *stream = stream_of(handle);
    return end(stream ? drain(stream) : CUDA_ERROR_INVALID_HANDLE);
}

EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags) {
    BEGIN("cuStreamWaitEvent");
    Stream *stream = stream_of(handle);
    Event *event = event_of(event_handle);
    if (!stream || !event || flags) return end(CUDA_ERROR_INVALID_HANDLE);
    if (event->done < event->recorded)
        push(stream, (Op){.kind = WAIT, .event = event, .generation = event->recorded});
    return end(CUDA_SUCCESS);
}

EXPORT CUresult cuEventCreate(CUevent *handle, unsigned flags) {
    BEGIN("cuEventCreate");
    Event *event = calloc(1, sizeof *event);
    event->alive = ALIVE;
    event->flags = flags;
    event->context = current;
    *handle = (CUevent)event;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
    BEGIN("cuEventDestroy");
    Event *event = event_of(handle);
    if (!event) return end(CUDA_ERROR_INVALID_HANDLE);
    event->alive = 0; /* leaked when it has no users, so that its use after the end is seen */
    return end(CUDA_SUCCESS);
}

EXPORT CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    BEGIN("cuEventRecord");
    Event *event = event_of(handle);
    Stream *stream = stream_of(stream_handle);
    if (!event || !stream || event->context != stream->context) return end(CUDA_ERROR_INVALID_HANDLE);
    push(stream, (Op){.kind = RECORD, .event = event, .generation = ++event->recorded});
    return end(CUDA_SUCCESS);
}

EXPORT CUresult cuEventQuery(CUevent handle) {
    BEGIN_UNSAFE("cuEventQuery");
    Event *event = event_of(handle);
    if (!event) return end(CUDA_ERROR_INVALID_HANDLE);
    return end(event->done < event->recorded ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

EXPORT CUresult cuEventSynchronize(CUevent handle) {
    BEGIN_UNSAFE("cuEventSynchronize");
    Event *event = event_of(handle);
    if (!event) return end(CUDA_ERROR_INVALID_HANDLE);
    event->users++;
    if (event->done < event->recorded) counts.engine_waits += is_engine;
    while (!broken && event->done < event->recorded) pthread_cond_wait(&changed, &lock);
    event->users--;
    return end((CUresult)broken);
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent start_handle, CUevent end_handle) {
    BEGIN("cuEventElapsedTime");
    Event *start = event_of(start_handle), *stop = event_of(end_handle);
    if (!start || !stop || !start->recorded || !stop->recorded) return end(CUDA_ERROR_INVALID_HANDLE);
    if ((start->flags | stop->flags) & CU_EVENT_DISABLE_TIMING) return end(CUDA_ERROR_INVALID_HANDLE);
    if (start->done < start->recorded || stop->done < stop->recorded) return end(CUDA_ERROR_NOT_READY);
    *milliseconds = (float)(stop->at_ms - start->at_ms);
    return end(CUDA_SUCCESS);
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent stop) {
    return cuEventElapsedTime(milliseconds, start, stop);
}

/* ---------------------------------------------------------------------------------------- devices and contexts */

EXPORT CUresult cuInit(unsigned flags) {
    CUresult code = begin_without_context("cuInit");
    return end(code ? code : flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
}

EXPORT CUresult cuDriverGetVersion(int *version) { return *version = driver_version, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int *count) { return *count = num_devices, CUDA_SUCCESS; }

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    return *device = ordinal, ordinal < num_devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    *value = attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM && has_one_address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    (void)device;
    return snprintf(name, (size_t)size, "fake device"), CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *name, int size, CUdevice device) {
    (void)device;
    return snprintf(name, (size_t)size, "FA:KE:00.0"), CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    return *context = (CUcontext)&contexts[device], CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) { return current = context, CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(CUcontext *context) { return *context = current, CUDA_SUCCESS; }

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (broken) return (CUresult)broken;
    if (depth == DEEPEST) {
        fault("contexts are pushed and not popped");
        return CUDA_ERROR_UNKNOWN;
    }
    stack[depth++] = current;
    current = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (broken) return (CUresult)broken;
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    *context = current;
    current = stack[--depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CUstreamCaptureMode before = capture_mode;
    return capture_mode = *mode, *mode = before, CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult code, const char **name) {
    return *name = code == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE", CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult code, const char **text) { return cuGetErrorName(code, text); }

/* NVIDIA's types of the functions as each version has them: an initialiser of another type does not compile. */
#define ROW(name, function, version) {#name, version, (void *)(1 ? (function) : (PFN_##name##_v##version)0)}
static const struct { const char *name; int since; void *function; } exported[] = {
    ROW(cuInit, cuInit, 2000),
    ROW(cuDriverGetVersion, cuDriverGetVersion, 2020),
    ROW(cuDeviceGet, cuDeviceGet, 2000),
    ROW(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000),
    ROW(cuDeviceGetCount, cuDeviceGetCount, 2000),
    ROW(cuDeviceGetName, cuDeviceGetName, 2000),
    ROW(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, 4010),
    ROW(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000),
    ROW(cuCtxGetCurrent, cuCtxGetCurrent, 4000),
    ROW(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000),
    ROW(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000),
    ROW(cuCtxSetCurrent, cuCtxSetCurrent, 4000),
    ROW(cuGetErrorName, cuGetErrorName, 6000),
    ROW(cuGetErrorString, cuGetErrorString, 6000),
    ROW(cuMemAlloc, cuMemAlloc_v2, 3020),
    ROW(cuMemFree, cuMemFree_v2, 3020),
    ROW(cuMemsetD8Async, cuMemsetD8Async, 3020),
    ROW(cuStreamWriteValue32, cuStreamWriteValue32_v2, 11070),
    ROW(cuMemHostRegister, cuMemHostRegister_v2, 6050),
    ROW(cuMemHostUnregister, cuMemHostUnregister, 4000),
    ROW(cuStreamCreateWithPriority, cuStreamCreateWithPriority, 5050),
    ROW(cuStreamDestroy, cuStreamDestroy_v2, 4000),
    ROW(cuStreamQuery, cuStreamQuery, 2000),
    ROW(cuStreamSynchronize, cuStreamSynchronize, 2000),
    ROW(cuStreamWaitEvent, cuStreamWaitEvent, 3020),
    ROW(cuEventCreate, cuEventCreate, 2000),
    ROW(cuEventDestroy, cuEventDestroy_v2, 4000),
    ROW(cuEventRecord, cuEventRecord, 2000),
    ROW(cuEventQuery, cuEventQuery, 2000),
    ROW(cuEventSynchronize, cuEventSynchronize, 2000),
    ROW(cuEventElapsedTime, cuEventElapsedTime, 2000),
    ROW(cuEventElapsedTime, cuEventElapsedTime_v2, 12080),
    ROW(cuMemcpyAsync, cuMemcpyAsync, 4000),
    ROW(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, 3020),
    ROW(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, 10010),
    ROW(cuMemcpyBatchAsync, cuMemcpyBatchAsync, 12080),
    ROW(cuMemcpyBatchAsync, cuMemcpyBatchAsync_v2, 13000),
};

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status) {
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    *function = NULL;
    (void)flags;
    for (size_t i = 0; i < sizeof exported / sizeof *exported; i++) { /* the newest that the caller asked for */
        if (strcmp(exported[i].name, name) || exported[i].since > driver_version) continue;
        if (exported[i].since <= version) *function = exported[i].function;
        else if (!*function) found = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    }
    if (*function) found = CU_GET_PROC_ADDRESS_SUCCESS;
    if (status) *status = found;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* ---------------------------------------------------------------------------------------------- the test's side */

EXPORT void fake_pace(uint64_t new_seed, long new_longest_pause_us) {
    pthread_mutex_lock(&lock);
    seed = new_seed * 0x9E3779B97F4A7C15u | 1;
    longest_pause_us = new_longest_pause_us;
    pthread_mutex_unlock(&lock);
}

static void forget_registrations(void) {
    while (registered) take_out(&registered, registered->low);
    total_registered = 0;
}

/* As at first, but for streams and events that were not destroyed. */
EXPORT void fake_reset(void) {
    pthread_mutex_lock(&lock);
    while (device_memory) take_out(&device_memory, device_memory->low);
    forget_registrations();
    faults = broken = failing.code = 0;
    driver_version = 13000;
    largest_registration = most_registered = largest_batch = SIZE_MAX;
    has_one_address = num_devices = 1, holds_new_streams = is_capturing = 0, invalidated = 0;
    memset(&counts, 0, sizeof counts);
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_adopt(uintptr_t address, size_t size) {
    pthread_mutex_lock(&lock);
    add(&device_memory, address, size);
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_disown(uintptr_t address) {
    pthread_mutex_lock(&lock);
    size_t size = take_out(&device_memory, address);
    outlive_copies(address, address + size, "device memory is freed under a copy");
    pthread_mutex_unlock(&lock);
}

/* What is in the stream's queue, and what comes, waits until it is let go on. */
EXPORT void fake_hold(CUstream stream, int is_held) {
    pthread_mutex_lock(&lock);
    stream_of(stream)->is_held = is_held;
    tell();
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_let_all_go(void) {
    pthread_mutex_lock(&lock);
    for (Stream *stream = streams; stream; stream = stream->next) stream->is_held = 0;
    tell();
    pthread_mutex_unlock(&lock);
}

/* Returns when no stream can go on: each is empty, held, or waits for another. */
EXPORT void fake_settle(void) {
    pthread_mutex_lock(&lock);
    while (can_go_on()) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

/* The call fails once, after it succeeded as often as "after" says. */
EXPORT void fake_fail(const char *call, int code, long after) {
    pthread_mutex_lock(&lock);
    snprintf(failing.call, sizeof failing.call, "%s", call);
    failing.code = code;
    failing.after = after;
    failing.times = 1;
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_break(int code) {
    pthread_mutex_lock(&lock);
    broken = code;
    tell();
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_limit_registrations(size_t largest, size_t most) {
    pthread_mutex_lock(&lock);
    largest_registration = largest;
    most_registered = most;
    pthread_mutex_unlock(&lock);
}

/* As the end of a process does, whose device is broken. */
EXPORT void fake_forget_registrations(void) {
    pthread_mutex_lock(&lock);
    forget_registrations();
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_limit_queue(CUstream stream, size_t longest) { stream_of(stream)->longest_queue = longest; }
EXPORT void fake_hold_new_streams(int holds) { holds_new_streams = holds; }
EXPORT void fake_limit_batch(size_t largest) { largest_batch = largest; }
EXPORT void fake_set_one_address(int has) { has_one_address = has; }

EXPORT void fake_fail_often(long times) { failing.times = times; }
EXPORT void fake_set_num_devices(int num) { num_devices = num; }

/* This thread captures a graph in the default mode, or has done so. */
EXPORT void fake_capture(int begins) { is_capturing = captures_here = begins; }
EXPORT long fake_num_invalidated(void) { return invalidated; }

/* What this thread pays from now on is counted. */
EXPORT void fake_be_engine(int is) {
    is_engine = is;
    counts.engine_copies = counts.engine_waits = 0;
}

EXPORT long fake_num_engine_copies(void) { return counts.engine_copies; }
EXPORT long fake_num_engine_waits(void) { return counts.engine_waits; }
EXPORT void fake_set_version(int version) { driver_version = version; }
EXPORT int fake_has_failed(void) { return !failing.code; }
EXPORT long fake_num_faults(void) { return faults; }
EXPORT long fake_num_batches(void) { return counts.batches; }
EXPORT long fake_num_copies(void) { return counts.copies; }
EXPORT long fake_num_fills(void) { return counts.fills; }
EXPORT long fake_num_narrow_registrations(void) { return counts.narrow_registrations; }
EXPORT long fake_num_pageable(void) { return counts.pageable; }
EXPORT size_t fake_registered_bytes(void) { return total_registered; }

EXPORT long fake_num_registrations(void) {
    long num = 0;
    pthread_mutex_lock(&lock);
    for (Range *range = registered; range; range = range->next) num++;
    pthread_mutex_unlock(&lock);
    return num;
}

EXPORT long fake_num_streams(void) {
    long num = 0;
    pthread_mutex_lock(&lock);
    for (Stream *stream = streams; stream; stream = stream->next) num += stream->alive == ALIVE;
    pthread_mutex_unlock(&lock);
    return num;
}
