// The kernels for one instruction set, which CMakeLists.txt sets by compiler options.
#define FDK_UNIT fdk_unit_v2
#include "unit.inc"
