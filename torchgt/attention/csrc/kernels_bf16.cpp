#include "kernels_impl.h"

TORCHGT_KERNELS(kernels_bf16, BFloat16)
