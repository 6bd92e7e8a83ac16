# The numbers of layout.py as constants of C; a test compares the two.
cdef enum:
    TYPE_AT = 4
    TIMESTAMP_AT = 8
    ATTEMPTS_AT = 16
    ID_AT = 18
    BODY_AT = 34
    FRAME_OVERHEAD = 34
    TYPE_MESSAGE = 2
    RECORD_HEADER = 44
