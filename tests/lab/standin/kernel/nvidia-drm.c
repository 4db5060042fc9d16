// SPDX-License-Identifier: GPL-2.0
/* Stand-in for nvidia-drm.ko: the last link of the chain; it makes no DRM device. */
#include "standin.h"

static bool modeset;
module_param(modeset, bool, 0444);

static int __init drm_init(void)
{
	return nvkms_standin_register();
}

static void __exit drm_exit(void)
{
}

module_init(drm_init);
module_exit(drm_exit);
MODULE_LICENSE("GPL");
MODULE_VERSION(NV_VERSION);
MODULE_DESCRIPTION("stand-in for nvidia-drm.ko");
