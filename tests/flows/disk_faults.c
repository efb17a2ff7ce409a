/* Disk faults: the system's own calls below one folder, counted, and made to fail from here on.
 *
 * cc -shared -fPIC -o faults.so disk_faults.c -ldl; LD_PRELOAD=./faults.so python ...
 *
 *     call ── writes below the folder? ─ yes ─> counted, told ── its turn, or later and lasting? ── yes ─> errno, -1
 *       └───────── no ──────────────────────────────────────────────────────── no ─> the system's own
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long calls, turn;
static int error_number, lasting, told = -1;

/* Count the calls below a path from 1 on; the turn-th fails, and those after it where that lasts.
   An error below 0 is none: the process is killed there. */
void faults_begin(const char *path, long which, int error, int lasts, const char *tell)
{
    snprintf(folder, sizeof folder, "%s", path);
    calls = 0, turn = which, error_number = error, lasting = lasts;
    told = *tell ? open(tell, O_WRONLY | O_CREAT | O_TRUNC, 0644) : -1;
}

long faults_end(void)
{
    folder[0] = 0;
    if (told >= 0)
        close(told);
    told = -1;
    return calls;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int fails(const char *call, const char *path)
{
    char line[PATH_MAX + 32];
    size_t length = strlen(folder);
    if (!length || strncmp(path, folder, length) || (path[length] && path[length] != '/'))
        return 0;
    calls++;
    if (told >= 0) {
        int size = snprintf(line, sizeof line, "%s %s\n", call, path[length] ? path + length + 1 : ".");
        if (REAL(write)(told, line, size) < 0)
            abort();
    }
    if (turn == 0 || calls < turn || (calls > turn && !lasting))
        return 0;
    if (error_number < 0)
        raise(SIGKILL);
    errno = error_number;
    return 1;
}

static int fails_at(const char *call, int directory, const char *path)
{
    char whole[2 * PATH_MAX], link[64], from[PATH_MAX] = "";
    if (!folder[0])
        return 0;
    if (*path == '/')
        return fails(call, path);
    if (directory == AT_FDCWD) {
        if (!getcwd(from, sizeof from))
            return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        if (readlink(link, from, sizeof from - 1) < 0)
            return 0;
    }
    snprintf(whole, sizeof whole, "%s%s%s", from, *path ? "/" : "", path);
    return fails(call, whole);
}

static int fails_on(const char *call, int file)
{
    return fails_at(call, file, "");
}

#define MODE                                                                                                 \
    mode_t mode = 0;                                                                                         \
    if (flags & O_CREAT) {                                                                                   \
        va_list rest;                                                                                        \
        va_start(rest, flags);                                                                               \
        mode = va_arg(rest, mode_t);                                                                         \
        va_end(rest);                                                                                        \
    }

#define OPEN(name)                                                                                           \
    int name(const char *path, int flags, ...)                                                               \
    {                                                                                                        \
        MODE return (flags & O_CREAT) && fails_at("create", AT_FDCWD, path) ? -1                             \
                                                                            : REAL(name)(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                         \
    int name(int directory, const char *path, int flags, ...)                                                \
    {                                                                                                        \
        MODE return (flags & O_CREAT) && fails_at("create", directory, path)                                 \
            ? -1                                                                                             \
            : REAL(name)(directory, path, flags, mode);                                                      \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void *data, size_t size)
{
    return fails_on("write", file) ? -1 : REAL(write)(file, data, size);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t place)
{
    return fails_on("place", file) ? -1 : REAL(pwrite)(file, data, size, place);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t place)
{
    return fails_on("place", file) ? -1 : REAL(pwrite64)(file, data, size, place);
}

int fsync(int file)
{
    return fails_on("flush", file) ? -1 : REAL(fsync)(file);
}

int ftruncate(int file, off_t size)
{
    return fails_on("cut", file) ? -1 : REAL(ftruncate)(file, size);
}

int ftruncate64(int file, off64_t size)
{
    return fails_on("cut", file) ? -1 : REAL(ftruncate64)(file, size);
}

int mkdir(const char *path, mode_t mode)
{
    return fails_at("folder", AT_FDCWD, path) ? -1 : REAL(mkdir)(path, mode);
}

int rename(const char *path, const char *other)
{
    return fails_at("rename", AT_FDCWD, other) ? -1 : REAL(rename)(path, other);
}
