"""The native backend: C++ kernels in `cpp/`, called through ctypes."""
