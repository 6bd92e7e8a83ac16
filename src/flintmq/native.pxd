# What the compiled kernel takes from C: system calls that it makes itself, and the checksum.
cdef extern from "sys/socket.h" nogil:
    ssize_t recv(int fd, void* buf, size_t n, int flags)
    ssize_t send(int fd, const void* buf, size_t n, int flags)
    int MSG_DONTWAIT
    int MSG_NOSIGNAL

cdef extern from "sys/mman.h" nogil:
    int madvise(void* p, size_t n, int advice)

cdef extern from "sys/uio.h" nogil:
    ctypedef struct iovec "struct iovec":
        void* iov_base
        size_t iov_len
    ssize_t pwritev(int fd, const iovec* parts, int count, long long offset)

cdef extern from "checksum.h" nogil:
    unsigned int flintmq_crc32c(unsigned int crc, const unsigned char* p, size_t n)
