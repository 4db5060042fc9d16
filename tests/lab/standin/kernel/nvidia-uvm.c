// SPDX-License-Identifier: GPL-2.0
/* Stand-in for nvidia-uvm.ko: a dynamic major with /dev/nvidia-uvm (0) and /dev/nvidia-uvm-tools (1). */
#include "standin.h"

static dev_t first;
static struct cdev uvm_cdev;
static const struct file_operations uvm_fops = { .owner = THIS_MODULE };

static int __init uvm_init(void)
{
	int error = nvidia_standin_register("nvidia-uvm");

	if (error)
		return error;
	error = alloc_chrdev_region(&first, 0, 2, "nvidia-uvm");
	if (error)
		return error;
	error = standin_cdev_add(&uvm_cdev, &uvm_fops, first, 2);
	if (error)
		unregister_chrdev_region(first, 2);
	return error;
}

static void __exit uvm_exit(void)
{
	cdev_del(&uvm_cdev);
	unregister_chrdev_region(first, 2);
}

module_init(uvm_init);
module_exit(uvm_exit);
MODULE_LICENSE("GPL");
MODULE_VERSION(NV_VERSION);
MODULE_DESCRIPTION("stand-in for nvidia-uvm.ko");
