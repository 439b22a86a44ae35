"""Several texts side by side: their forwards are one."""
