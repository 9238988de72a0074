"""What is known of the kernels: inspections, proofs, validations, and ARCHS.md made of them."""
