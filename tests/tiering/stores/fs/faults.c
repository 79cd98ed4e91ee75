/* SPDX-License-Identifier: Apache-2.0
 *
 * A C library whose reads fail or hang for chosen files. $KVO_FAULTS names a file of lines "eio NAME", "enodata NAME"
 * or "hang NAME", where NAME is a part of a path. It is read anew at each call, and a call that hangs returns when its
 * line is gone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int fault_of(const char *path, const char *kind) {
    const char *plan = getenv("KVO_FAULTS");
    char line[512];
    int found = 0;
    FILE *file = plan ? fopen(plan, "re") : NULL;
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *name = strchr(line, ' ');
        if (name && (*name++ = 0, strcmp(line, kind) == 0) && *name && strstr(path, name))
            found = 1;
    }
    if (file)
        fclose(file);
    return found;
}

static int check(const char *path) {
    while (fault_of(path, "hang"))
        usleep(2000);
    if (fault_of(path, "eio")) {
        errno = EIO;
        return -1;
    }
    if (fault_of(path, "enodata")) {
        errno = ENODATA;
        return -1;
    }
    return 0;
}

static int check_fd(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return strstr(path, ".kvb") ? check(path) : 0;
}

ssize_t readv(int fd, const struct iovec *buffers, int count) {
    ssize_t (*real)(int, const struct iovec *, int) = dlsym(RTLD_NEXT, "readv");
    return check_fd(fd) ? -1 : real(fd, buffers, count);
}

int lstat(const char *path, struct stat *status) {
    int (*real)(const char *, struct stat *) = dlsym(RTLD_NEXT, "lstat");
    char line[4200];
    snprintf(line, sizeof line, "stat:%s", strrchr(path, '/') ? strrchr(path, '/') + 1 : path);
    return strstr(path, ".kvb") && check(line) ? -1 : real(path, status);
}

int lstat64(const char *path, struct stat64 *status) {
    int (*real)(const char *, struct stat64 *) = dlsym(RTLD_NEXT, "lstat64");
    char line[4200];
    snprintf(line, sizeof line, "stat:%s", strrchr(path, '/') ? strrchr(path, '/') + 1 : path);
    return strstr(path, ".kvb") && check(line) ? -1 : real(path, status);
}
