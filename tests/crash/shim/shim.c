/* A layer between a daemon and its disk, clock and descriptors, put in place with LD_PRELOAD.
 *
 * Every change below FLINTMQ_SHIM_ROOT is made as asked, and written down in the file FLINTMQ_SHIM_TRACE after it was
 * made and before its caller hears of it. A sync does nothing but take its time: its beginning and its end are written
 * down. So after kill -9 the trace tells what a device may hold if the power had gone instead (see power.py).
 *
 * The file FLINTMQ_SHIM_CONTROL is mapped, and can be changed while the daemon runs: see struct control.
 *
 * An entry of the trace, in the machine's byte order:
 *
 *     size of all (4) | kind (4) | handle (8) | offset (8) | length of the first text (4) | text, or bytes
 *
 * A handle stands for one open() or one sync. A rename has two texts: the old path and the new one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, CREATE, WRITE, TRUNCATE, SYNC_BEGIN, SYNC_END, RENAME, UNLINK, MKDIR, RMDIR };

struct control {
    int64_t wall_ns;     /* added to the wall clock */
    int32_t sync_error;  /* syncs of files fail with this error, if it is not 0 */
    int32_t write_error; /* writes of files fail with this error */
    int32_t open_error;  /* open, accept, socket and epoll_create fail with this error */
    int32_t sync_micros; /* a sync takes up to this long */
    int32_t failed;      /* how many calls failed so far */
};

struct head {
    uint32_t size, kind;
    uint64_t handle;
    int64_t offset;
    uint32_t first;
} __attribute__((packed));

#define MOST_FDS 65536
static char *paths[MOST_FDS];
static uint64_t handles[MOST_FDS];
static uint64_t last_handle;
static char root[4096];
static size_t root_size;
static int trace = -1;
static struct control nothing, *control = &nothing;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("FLINTMQ_SHIM_ROOT");
    if (text && strlen(text) < sizeof root) {
        strcpy(root, text);
        root_size = strlen(root);
    }
    if ((text = getenv("FLINTMQ_SHIM_TRACE")))
        trace = (int)syscall(SYS_openat, AT_FDCWD, text, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if ((text = getenv("FLINTMQ_SHIM_CONTROL"))) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, text, O_RDWR | O_CLOEXEC, 0);
        void *map = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map != MAP_FAILED) control = map;
        if (fd >= 0) syscall(SYS_close, fd);
    }
}

static int is_ours(const char *path) {
    return root_size && path && !strncmp(path, root, root_size) && (path[root_size] == '/' || !path[root_size]);
}

/* The path that a call with a folder's descriptor means, in `room`; NULL if it is none of ours. */
static const char *whole(int folder, const char *path, char *room, size_t size) {
    if (path[0] == '/' || folder == AT_FDCWD) return is_ours(path) ? path : NULL;
    if (folder < 0 || folder >= MOST_FDS || !paths[folder]) return NULL;
    snprintf(room, size, "%s/%s", paths[folder], path);
    return room;
}

static const char *path_of(int fd) { return fd >= 0 && fd < MOST_FDS ? paths[fd] : NULL; }

static int refuse(int error) {
    __atomic_add_fetch(&control->failed, 1, __ATOMIC_RELAXED);
    errno = error;
    return -1;
}

/* One entry; the lock is held, so that entries are in the order of the changes. */
static void note(uint32_t kind, uint64_t handle, int64_t offset, const struct iovec *parts, int count, uint32_t first) {
    if (trace < 0) return;
    struct iovec all[1026];
    struct head head = {sizeof head, kind, handle, offset, first};
    all[0] = (struct iovec){&head, sizeof head};
    for (int i = 0; i < count && i < 1025; i++) {
        all[i + 1] = parts[i];
        head.size += (uint32_t)parts[i].iov_len;
    }
    int saved = errno;
    /* A single call: a kill leaves an entry whole, or cut off at the end of the trace. */
    if (syscall(SYS_writev, trace, all, count + 1) != (long)head.size) _exit(99);
    errno = saved;
}

static void note_path(uint32_t kind, uint64_t handle, int64_t offset, const char *path) {
    struct iovec part = {(void *)path, strlen(path)};
    note(kind, handle, offset, &part, 1, (uint32_t)part.iov_len);
}

/* --- Files ---------------------------------------------------------------------------------------------------------- */

static int opened(int fd, const char *path, int flags, int existed) {
    if (fd < 0) return fd;
    if (fd < MOST_FDS) {
        free(paths[fd]);
        paths[fd] = strdup(path);
        handles[fd] = ++last_handle;
        note_path((flags & O_CREAT) && !existed ? CREATE : OPEN, handles[fd], flags & O_TRUNC ? 0 : -1, path);
    }
    return fd;
}

static int open_below(int folder, const char *path, int flags, mode_t mode) {
    char room[8192];
    const char *full = whole(folder, path, room, sizeof room);
    if (control->open_error && full) return refuse(control->open_error);
    if (!full) return (int)syscall(SYS_openat, folder, path, flags, mode);
    pthread_mutex_lock(&lock);
    struct stat stat;
    int existed = syscall(SYS_newfstatat, AT_FDCWD, full, &stat, 0) == 0;
    int fd = opened((int)syscall(SYS_openat, folder, path, flags, mode), full, flags, existed);
    pthread_mutex_unlock(&lock);
    return fd;
}

#define MODE(last) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list list; \
        va_start(list, last); \
        mode = va_arg(list, mode_t); \
        va_end(list); \
    }

int open(const char *path, int flags, ...) { MODE(flags) return open_below(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return open_below(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags) return open_below(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags) return open_below(folder, path, flags, mode); }

int close(int fd) {
    if (path_of(fd)) {
        pthread_mutex_lock(&lock);
        free(paths[fd]);
        paths[fd] = NULL;
        int result = (int)syscall(SYS_close, fd);
        pthread_mutex_unlock(&lock);
        return result;
    }
    return (int)syscall(SYS_close, fd);
}

static ssize_t put(int fd, const struct iovec *parts, int count, off_t offset, int placed) {
    pthread_mutex_lock(&lock);
    ssize_t size;
    if (control->write_error) {
        size = refuse(control->write_error);
    } else if (placed) {
        size = syscall(SYS_pwritev, fd, parts, count, (long)offset, 0L);
    } else {
        int appends = (int)syscall(SYS_fcntl, fd, F_GETFL) & O_APPEND;
        offset = syscall(SYS_lseek, fd, 0, appends ? SEEK_END : SEEK_CUR);
        size = syscall(SYS_writev, fd, parts, count);
    }
    ssize_t left = size;
    for (int i = 0; i < count && left > 0; i++) {
        struct iovec part = {parts[i].iov_base, (ssize_t)parts[i].iov_len < left ? parts[i].iov_len : (size_t)left};
        note(WRITE, handles[fd], offset + (size - left), &part, 1, (uint32_t)part.iov_len);
        left -= (ssize_t)part.iov_len;
    }
    pthread_mutex_unlock(&lock);
    return size;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (!path_of(fd)) return syscall(SYS_write, fd, data, size);
    struct iovec part = {(void *)data, size};
    return put(fd, &part, 1, 0, 0);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    return path_of(fd) ? put(fd, parts, count, 0, 0) : syscall(SYS_writev, fd, parts, count);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    struct iovec part = {(void *)data, size};
    return path_of(fd) ? put(fd, &part, 1, offset, 1) : syscall(SYS_pwrite64, fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return pwrite(fd, data, size, offset); }

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    return path_of(fd) ? put(fd, parts, count, offset, 1) : syscall(SYS_pwritev, fd, parts, count, (long)offset, 0L);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
    return pwritev(fd, parts, count, offset);
}
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    if (path_of(fd)) return put(fd, parts, count, offset, offset != -1);
    return syscall(SYS_pwritev2, fd, parts, count, (long)offset, 0L, flags);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    return pwritev2(fd, parts, count, offset, flags);
}

int ftruncate(int fd, off_t size) {
    if (!path_of(fd)) return (int)syscall(SYS_ftruncate, fd, size);
    pthread_mutex_lock(&lock);
    int result = (int)syscall(SYS_ftruncate, fd, size);
    if (!result) note(TRUNCATE, handles[fd], size, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return result;
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }

int posix_fallocate(int fd, off_t offset, off_t size) {
    struct stat before;
    pthread_mutex_lock(&lock);
    int grows = path_of(fd) && !syscall(SYS_fstat, fd, &before) && before.st_size < offset + size;
    int error = control->write_error && path_of(fd) ? control->write_error : 0;
    if (error)
        refuse(error);
    else if (syscall(SYS_fallocate, fd, 0, offset, size))
        error = errno;
    if (!error && grows) note(TRUNCATE, handles[fd], offset + size, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return error;
}
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return posix_fallocate(fd, offset, size); }

static int sync_of(int fd) {
    if (!path_of(fd)) return 0;
    if (control->sync_error) return refuse(control->sync_error);
    pthread_mutex_lock(&lock);
    uint64_t sync = ++last_handle;
    note(SYNC_BEGIN, sync, (int64_t)handles[fd], NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    if (control->sync_micros > 0) {
        struct timespec pause = {0, (long)(sync * 2654435761u % (unsigned)control->sync_micros) * 1000L};
        nanosleep(&pause, NULL);
    }
    pthread_mutex_lock(&lock);
    note(SYNC_END, sync, 0, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return 0;
}
int fsync(int fd) { return sync_of(fd); }
int fdatasync(int fd) { return sync_of(fd); }

/* --- Names ---------------------------------------------------------------------------------------------------------- */

static int rename_below(int from, const char *old, int to, const char *new) {
    char old_room[8192], new_room[8192];
    const char *old_path = whole(from, old, old_room, sizeof old_room);
    const char *new_path = whole(to, new, new_room, sizeof new_room);
    pthread_mutex_lock(&lock);
    int result = (int)syscall(SYS_renameat, from, old, to, new);
    if (!result && old_path && new_path) {
        struct iovec parts[2] = {{(void *)old_path, strlen(old_path)}, {(void *)new_path, strlen(new_path)}};
        note(RENAME, 0, 0, parts, 2, (uint32_t)parts[0].iov_len);
    }
    pthread_mutex_unlock(&lock);
    return result;
}
int rename(const char *old, const char *new) { return rename_below(AT_FDCWD, old, AT_FDCWD, new); }
int renameat(int from, const char *old, int to, const char *new) { return rename_below(from, old, to, new); }

static int remove_below(int folder, const char *path, int flags) {
    char room[8192];
    const char *full = whole(folder, path, room, sizeof room);
    pthread_mutex_lock(&lock);
    int result = (int)syscall(SYS_unlinkat, folder, path, flags);
    if (!result && full) note_path(flags & AT_REMOVEDIR ? RMDIR : UNLINK, 0, 0, full);
    pthread_mutex_unlock(&lock);
    return result;
}
int unlink(const char *path) { return remove_below(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return remove_below(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int folder, const char *path, int flags) { return remove_below(folder, path, flags); }

static int mkdir_below(int folder, const char *path, mode_t mode) {
    char room[8192];
    const char *full = whole(folder, path, room, sizeof room);
    pthread_mutex_lock(&lock);
    int result = (int)syscall(SYS_mkdirat, folder, path, mode);
    if (!result && full) note_path(MKDIR, 0, 0, full);
    pthread_mutex_unlock(&lock);
    return result;
}
int mkdir(const char *path, mode_t mode) { return mkdir_below(AT_FDCWD, path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { return mkdir_below(folder, path, mode); }

/* --- Descriptors ---------------------------------------------------------------------------------------------------- */

int accept(int fd, struct sockaddr *address, socklen_t *size) {
    if (control->open_error) return refuse(control->open_error);
    return (int)syscall(SYS_accept4, fd, address, size, 0);
}
int accept4(int fd, struct sockaddr *address, socklen_t *size, int flags) {
    if (control->open_error) return refuse(control->open_error);
    return (int)syscall(SYS_accept4, fd, address, size, flags);
}
int socket(int domain, int type, int protocol) {
    if (control->open_error) return refuse(control->open_error);
    return (int)syscall(SYS_socket, domain, type, protocol);
}

/* --- The clock ------------------------------------------------------------------------------------------------------ */

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int result = real(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) && control->wall_ns) {
        int64_t moved = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + control->wall_ns;
        now->tv_sec = moved / 1000000000;
        now->tv_nsec = moved % 1000000000;
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where) *where = exact.tv_sec;
    return exact.tv_sec;
}
