"""Workers, one file a device. Nothing outside this folder and npu_ops/device.py asks which device it runs on."""
