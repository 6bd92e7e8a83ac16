# Numbers as they stand on the wire.
cdef inline unsigned int rd32(const unsigned char* p) noexcept nogil:
    return (<unsigned int>p[0] << 24) | (<unsigned int>p[1] << 16) | (<unsigned int>p[2] << 8) | p[3]

cdef inline void wr32(unsigned char* p, unsigned int v) noexcept nogil:
    p[0] = (v >> 24) & 255
    p[1] = (v >> 16) & 255
    p[2] = (v >> 8) & 255
    p[3] = v & 255
