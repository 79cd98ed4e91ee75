/* SPDX-License-Identifier: Apache-2.0
 *
 * A C library in front of the real one, whose reads and writes of files below $KVO_SOAK_ROOT fail or dawdle by chance.
 * $KVO_SOAK_PLAN names a file with lines "CALL ERRNO PERCENT MILLISECONDS", read anew at each call. An ERRNO of 0 only
 * takes the time.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_below_root(int fd) {
    const char *root = getenv("KVO_SOAK_ROOT");
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = root ? readlink(link, path, sizeof path - 1) : -1;
    return size > 0 && strncmp(path, root, strlen(root)) == 0;
}

static int fails(const char *call, int fd) {
    const char *plan = getenv("KVO_SOAK_PLAN");
    char name[16];
    int number, percent, milliseconds, failure = 0;
    FILE *file = plan && is_below_root(fd) ? fopen(plan, "re") : NULL;
    if (!file)
        return 0;
    while (fscanf(file, "%15s %d %d %d", name, &number, &percent, &milliseconds) == 4)
        if (strcmp(name, call) == 0 && rand() % 100 < percent) {
            failure = number;
            usleep((useconds_t)milliseconds * 1000);
        }
    fclose(file);
    errno = failure;
    return failure;
}

typedef const struct iovec *Buffers;

/* Which of the positional calls a Python uses depends on its C library. */
#define INTERPOSE(name, kind, parameters, ...)                        \
    ssize_t name parameters {                                         \
        ssize_t(*real) parameters = dlsym(RTLD_NEXT, #name);          \
        return fails(kind, fd) ? -1 : real(__VA_ARGS__);              \
    }

INTERPOSE(readv, "read", (int fd, Buffers buffers, int count), fd, buffers, count)
INTERPOSE(writev, "write", (int fd, Buffers buffers, int count), fd, buffers, count)
INTERPOSE(preadv, "read", (int fd, Buffers buffers, int count, off_t at), fd, buffers, count, at)
INTERPOSE(preadv64, "read", (int fd, Buffers buffers, int count, off64_t at), fd, buffers, count, at)
INTERPOSE(preadv64v2, "read", (int fd, Buffers buffers, int count, off64_t at, int flags), fd, buffers, count, at, flags)
INTERPOSE(pwritev, "write", (int fd, Buffers buffers, int count, off_t at), fd, buffers, count, at)
INTERPOSE(pwritev64, "write", (int fd, Buffers buffers, int count, off64_t at), fd, buffers, count, at)
INTERPOSE(pwritev64v2, "write", (int fd, Buffers buffers, int count, off64_t at, int flags), fd, buffers, count, at, flags)
