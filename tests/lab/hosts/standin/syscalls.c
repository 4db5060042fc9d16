// Copyright: gpufleet.driver contributors
// GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
// SPDX-License-Identifier: GPL-3.0-or-later
/*
 * The stand-in kernel's system calls, for machines that are containers and share the host's kernel.
 *
 * Listed in /etc/ld.so.preload, so every program of the machine has it. It answers a few questions in place of the
 * real kernel, and passes everything else on:
 *   finit_module, delete_module   load and unload a stand-in module (the work is done by ./kernel)
 *   uname                         the release the machine's root file system was made for
 *   /proc/modules                 a file kept under RUN: a kernel built without modules has none to mount over
 *   /sys/module/NAME/refcnt       counted afresh whenever it, or /proc/modules, is opened:
 *                                 dependants + open descriptors of the module's device nodes + the "stuck" parameter
 *   opening /dev/nvidia...        fails with ENXIO while the module behind it is not loaded
 * Written with old C library symbols only, since it is compiled on the host and runs with the machine's library.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#define RUN "/run/gpufleet-lab"
#define KERNEL "/usr/lib/gpufleet-lab/kernel"
#define MAX_MODULES 16
#define MAX_DEVICES 32

extern char **environ;

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

/* ---- small readers ------------------------------------------------------------------------------------------- */

static int read_text(const char *path, char *text, size_t size)
{
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) { text[0] = 0; return -1; }
    ssize_t n = read(fd, text, size - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    return n > 0 ? (int)n : 0;
}

static void write_text(const char *path, const char *text)
{
    char part[300];
    snprintf(part, sizeof part, "%s.%d", path, (int)getpid());
    int fd = (int)syscall(SYS_openat, AT_FDCWD, part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) return;
    ssize_t want = (ssize_t)strlen(text), n = write(fd, text, want);
    close(fd);
    if (n != want || rename(part, path)) unlink(part);
}

static unsigned number(const char **at)
{
    unsigned value = 0;
    while (**at == ' ' || **at == ':' || **at == '\n') ++*at;
    while (**at >= '0' && **at <= '9') value = value * 10 + (unsigned)(*(*at)++ - '0');
    return value;
}

/* ---- reference counts ---------------------------------------------------------------------------------------- */

struct module { char name[56]; unsigned size; dev_t devices[MAX_DEVICES]; int device_count; unsigned refs; char users[256]; };

/* RUN/modules/NAME holds "SIZE MAJOR:MINOR MAJOR:MINOR ..." */
static int loaded_modules(struct module *modules)
{
    int count = 0;
    DIR *dir = opendir(RUN "/modules");
    struct dirent *entry, *holder;
    while (dir && (entry = readdir(dir)) && count < MAX_MODULES) {
        if (entry->d_name[0] == '.' || strlen(entry->d_name) >= sizeof modules->name) continue;
        struct module *m = &modules[count++];
        char path[300], text[1024];
        memset(m, 0, sizeof *m);
        strcpy(m->name, entry->d_name);
        snprintf(path, sizeof path, RUN "/modules/%s", m->name);
        read_text(path, text, sizeof text);
        const char *at = text;
        m->size = number(&at);
        while (*at == ' ' && m->device_count < MAX_DEVICES) {
            unsigned major_ = number(&at), minor_ = number(&at);
            m->devices[m->device_count++] = makedev(major_, minor_);
        }
        snprintf(path, sizeof path, "/sys/module/%s/parameters/stuck", m->name);
        read_text(path, text, sizeof text);
        m->refs = text[0] == '1' || text[0] == 'Y' || text[0] == 'y';
        snprintf(path, sizeof path, "/sys/module/%s/holders", m->name);
        DIR *holders = opendir(path);
        while (holders && (holder = readdir(holders)))
            if (holder->d_name[0] != '.') {
                m->refs++;
                size_t used = strlen(m->users);
                snprintf(m->users + used, sizeof m->users - used, "%s,", holder->d_name);
            }
        if (holders) closedir(holders);
    }
    if (dir) closedir(dir);
    return count;
}

static void count_descriptors(struct module *modules, int count)
{
    DIR *proc = opendir("/proc"), *fds;
    struct dirent *process, *entry;
    char path[600];
    while (proc && (process = readdir(proc))) {
        if (process->d_name[0] < '1' || process->d_name[0] > '9') continue;
        snprintf(path, sizeof path, "/proc/%s/fd", process->d_name);
        if (!(fds = opendir(path))) continue;
        while ((entry = readdir(fds))) {
            struct stat st;
            if (entry->d_name[0] == '.' || fstatat(dirfd(fds), entry->d_name, &st, 0) || !S_ISCHR(st.st_mode)) continue;
            for (int i = 0; i < count; i++)
                for (int d = 0; d < modules[i].device_count; d++)
                    if (modules[i].devices[d] == st.st_rdev) modules[i].refs++;
        }
        closedir(fds);
    }
    if (proc) closedir(proc);
}

static void refresh(void)
{
    static struct module modules[MAX_MODULES];
    char text[8192], path[300];
    int saved = errno, count;
    size_t used = 0;
    if (geteuid() != 0 || access(RUN "/modules", F_OK)) return; /* others cannot see every process: they read the last count */
    count = loaded_modules(modules);
    count_descriptors(modules, count);
    text[0] = 0;
    for (int i = 0; i < count; i++) {
        struct module *m = &modules[i];
        char refs[16];
        used += (size_t)snprintf(text + used, sizeof text - used, "%s %u %u %s Live 0x0000000000000000 (POE)\n", m->name, m->size,
                                 m->refs, m->users[0] ? m->users : "-");
        snprintf(refs, sizeof refs, "%u\n", m->refs);
        snprintf(path, sizeof path, "/sys/module/%s/refcnt", m->name);
        write_text(path, refs);
    }
    write_text(RUN "/proc_modules", text);
    errno = saved;
}

static int is_counted(const char *path)
{
    size_t n = strlen(path);
    return !strcmp(path, "/proc/modules") || (!strncmp(path, "/sys/module/", 12) && n > 7 && !strcmp(path + n - 7, "/refcnt"));
}

static const char *seen(const char *path, int contents)
{
    if (!path || path[0] != '/' || !is_counted(path)) return path;
    if (contents) refresh();
    return strcmp(path, "/proc/modules") ? path : RUN "/proc_modules";
}

/* The nodes outlive the module; opening one then finds no driver. */
static int has_no_driver(const char *path)
{
    const char *module;
    if (!path || strncmp(path, "/dev/nvidia", 11)) return 0;
    module = !strncmp(path + 11, "-uvm", 4) ? RUN "/modules/nvidia_uvm" : RUN "/modules/nvidia";
    if (!access(module, F_OK)) return 0;
    errno = ENXIO;
    return 1;
}

/* ---- files --------------------------------------------------------------------------------------------------- */

#define OPEN(name)                                                                                                       \
    int name(const char *path, int flags, ...)                                                                           \
    {                                                                                                                    \
        va_list ap; va_start(ap, flags); mode_t mode = va_arg(ap, mode_t); va_end(ap);                                   \
        if (has_no_driver(path)) return -1;                                                                              \
        return REAL(name)(seen(path, 1), flags, mode);                                                                   \
    }
#define OPENAT(name)                                                                                                     \
    int name(int dir, const char *path, int flags, ...)                                                                  \
    {                                                                                                                    \
        va_list ap; va_start(ap, flags); mode_t mode = va_arg(ap, mode_t); va_end(ap);                                   \
        if (has_no_driver(path)) return -1;                                                                              \
        return REAL(name)(dir, seen(path, 1), flags, mode);                                                              \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
FILE *fopen(const char *path, const char *mode) { return has_no_driver(path) ? NULL : REAL(fopen)(seen(path, 1), mode); }
FILE *fopen64(const char *path, const char *mode) { return has_no_driver(path) ? NULL : REAL(fopen64)(seen(path, 1), mode); }
int stat(const char *path, struct stat *st) { return REAL(stat)(seen(path, 0), st); }
int stat64(const char *path, struct stat64 *st) { return REAL(stat64)(seen(path, 0), st); }
int lstat(const char *path, struct stat *st) { return REAL(lstat)(seen(path, 0), st); }
int lstat64(const char *path, struct stat64 *st) { return REAL(lstat64)(seen(path, 0), st); }
int fstatat(int dir, const char *path, struct stat *st, int flags) { return REAL(fstatat)(dir, seen(path, 0), st, flags); }
int fstatat64(int dir, const char *path, struct stat64 *st, int flags) { return REAL(fstatat64)(dir, seen(path, 0), st, flags); }
int statx(int dir, const char *path, int flags, unsigned mask, struct statx *st) { return REAL(statx)(dir, seen(path, 0), flags, mask, st); }
int access(const char *path, int mode) { return REAL(access)(seen(path, 0), mode); }
int faccessat(int dir, const char *path, int mode, int flags) { return REAL(faccessat)(dir, seen(path, 0), mode, flags); }

int uname(struct utsname *name)
{
    int rc = REAL(uname)(name);
    if (rc == 0) snprintf(name->release, sizeof name->release, "%s", RELEASE);
    return rc;
}

/* ---- modules ------------------------------------------------------------------------------------------------- */

/* Run KERNEL ARG...; its exit status is the error number, 0 for success. */
static int ask_kernel(const char *verb, const char *what, const char *options)
{
    char *argv[] = { KERNEL, (char *)verb, (char *)what, (char *)options, NULL };
    pid_t pid;
    int status;
    if (posix_spawn(&pid, KERNEL, NULL, NULL, argv, environ)) { errno = ENOSYS; return -1; }
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR) return -1;
    errno = WIFEXITED(status) ? WEXITSTATUS(status) : EIO;
    return errno ? -1 : 0;
}

int delete_module(const char *name, unsigned flags)
{
    char forced[2] = { flags & O_TRUNC ? '1' : '0', 0 };
    if (geteuid() != 0) { errno = EPERM; return -1; }
    return ask_kernel("unload", name, forced);
}

long syscall(long nr, ...)
{
    long a[6];
    va_list ap;
    va_start(ap, nr);
    for (int i = 0; i < 6; i++) a[i] = va_arg(ap, long);
    va_end(ap);
    if (nr == SYS_finit_module) {
        char path[32];
        if (geteuid() != 0) { errno = EPERM; return -1; }
        snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getpid(), (int)a[0]);
        return ask_kernel("load", path, (const char *)a[1]);
    }
    static long (*next)(long, ...);
    if (!next) next = (long (*)(long, ...))real("syscall");
    return next(nr, a[0], a[1], a[2], a[3], a[4], a[5]);
}
