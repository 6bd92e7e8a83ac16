# CRC-32C.
cdef extern from "checksum.h" nogil:
    unsigned int flintmq_crc32c(unsigned int crc, const unsigned char* p, size_t n)
