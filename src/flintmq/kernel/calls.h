/* The table of system calls that the compiled kernel makes: recv, send, pwritev.
 *
 * An entry returns a count or minus the error number, as Linux itself does, and never sets errno: an entry written in
 * Python cannot set it reliably before it gives the GIL back. The table is static, so every extension that includes
 * this file has its own copy: only one may.
 */
#pragma once
#include <Python.h>
#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

typedef struct {
    Py_ssize_t (*recv)(int fd, void *buf, size_t size, int flags);
    Py_ssize_t (*send)(int fd, const void *buf, size_t size, int flags);
    Py_ssize_t (*pwritev)(int fd, const struct iovec *parts, int count, long long offset);
} flintmq_calls;

static Py_ssize_t flintmq_recv(int fd, void *buf, size_t size, int flags) {
    ssize_t n = recv(fd, buf, size, flags);
    return n < 0 ? -errno : n;
}

static Py_ssize_t flintmq_send(int fd, const void *buf, size_t size, int flags) {
    ssize_t n = send(fd, buf, size, flags);
    return n < 0 ? -errno : n;
}

static Py_ssize_t flintmq_pwritev(int fd, const struct iovec *parts, int count, long long offset) {
    ssize_t n = pwritev(fd, parts, count, offset);
    return n < 0 ? -errno : n;
}

static const flintmq_calls libc_calls = {flintmq_recv, flintmq_send, flintmq_pwritev};
static flintmq_calls calls = {flintmq_recv, flintmq_send, flintmq_pwritev};
