#include "kernels_impl.h"

TORCHGT_KERNELS(kernels_f32, float)
