// SPDX-License-Identifier: GPL-2.0
/* Stand-in for nvidia-modeset.ko: depends on nvidia, serves /dev/nvidia-modeset, is depended on by nvidia-drm. */
#include "standin.h"

static struct cdev modeset_cdev;
static const struct file_operations modeset_fops = { .owner = THIS_MODULE };

int nvkms_standin_register(void)
{
	return 0;
}
EXPORT_SYMBOL_GPL(nvkms_standin_register);

static int __init modeset_init(void)
{
	dev_t node = MKDEV(NV_MAJOR, NV_MINOR_MODESET);
	int error = nvidia_standin_register("nvidia-modeset");

	if (error)
		return error;
	error = register_chrdev_region(node, 1, NV_REGION("nvidia-modeset"));
	if (error)
		return error;
	error = standin_cdev_add(&modeset_cdev, &modeset_fops, node, 1);
	if (error)
		unregister_chrdev_region(node, 1);
	return error;
}

static void __exit modeset_exit(void)
{
	cdev_del(&modeset_cdev);
	unregister_chrdev_region(MKDEV(NV_MAJOR, NV_MINOR_MODESET), 1);
}

module_init(modeset_init);
module_exit(modeset_exit);
MODULE_LICENSE("GPL");
MODULE_VERSION(NV_VERSION);
MODULE_DESCRIPTION("stand-in for nvidia-modeset.ko");
