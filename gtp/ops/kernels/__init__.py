"""Triton kernels. Imported where they are used: `import gtp` needs torch only."""
