//! The dice of the standard library, by which its maps and tokio's `select!` are ordered, and of fastrand, by which
//! kube's pauses differ: in a world they come from the seed, so that the world repeats.
#![allow(
    unsafe_code,
    reason = "the C library's function is replaced for this test binary"
)]

use std::cell::Cell;

thread_local! {
    static STATE: Cell<u64> = const { Cell::new(0) };
}

/// What this thread draws from now on. Maps that the thread has made before keep their order.
pub(crate) fn throw(seed: u64) {
    STATE.set(seed);
    fastrand::seed(seed);
}

/// Stands in for getrandom(2) of the C library.
///
/// # Safety
/// As there: `buffer` has room for `length` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut u8, length: usize, _flags: u32) -> isize {
    for at in 0..length {
        // SplitMix64.
        let state = STATE.get().wrapping_add(0x9E37_79B9_7F4A_7C15);
        STATE.set(state);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let byte = (mixed >> 32).to_le_bytes()[0];
        // SAFETY: the caller says that there is room.
        unsafe { buffer.add(at).write(byte) };
    }
    length.cast_signed()
}
