# The table of system calls. For lane.py alone: each extension that includes it has a table of its own.
cdef extern from "calls.h" nogil:
    ctypedef struct iovec "struct iovec":
        void* iov_base
        size_t iov_len
    # Py_ssize_t, not ssize_t: Cython refuses to assign one to the other here.
    ctypedef struct flintmq_calls:
        Py_ssize_t recv(int, void*, size_t, int) noexcept nogil
        Py_ssize_t send(int, const void*, size_t, int) noexcept nogil
        Py_ssize_t pwritev(int, const iovec*, int, long long) noexcept nogil
    flintmq_calls calls
    flintmq_calls libc_calls
    int MSG_DONTWAIT
    int MSG_NOSIGNAL

cdef extern from "sys/mman.h" nogil:
    int madvise(void* p, size_t n, int advice)

cdef extern from "arena.h" nogil:
    int flintmq_one_arena()
