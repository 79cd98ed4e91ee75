/* SPDX-License-Identifier: Apache-2.0
 *
 * A wall clock that jumps. $KVO_CLOCK names a file of two 64-bit integers: the seconds that are added to the time of
 * day, and whether every other look at the clock subtracts them instead. The clock that only ever goes on is as it was.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *plan;
static long long looks;

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("KVO_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *found = mmap(NULL, 16, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED)
        plan = found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = (int)syscall(SYS_clock_gettime, clock, now);
    if (code == 0 && plan && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int is_odd = plan[1] && (__atomic_fetch_add(&looks, 1, __ATOMIC_RELAXED) & 1);
        now->tv_sec += is_odd ? -plan[0] : plan[0];
    }
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (result)
        *result = found.tv_sec;
    return found.tv_sec;
}
