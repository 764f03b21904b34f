//! What is free on every GPU.
