//! The dice of the standard library, by which its maps and tokio's `select!` are ordered, and of fastrand, by which
//! kube's pauses differ: in a world they come from the seed, so that the world repeats. And its time of day.
#![allow(
    unsafe_code,
    reason = "the C library's functions are replaced for this test binary"
)]

use std::cell::Cell;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use nix::libc;
use tokio::time::Instant;

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

/// The time of day at which worlds begin: that of 2026-01-01 in seconds since 1970.
const BEGIN: i64 = 1_767_225_600;

thread_local! {
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// From now on this thread's time of day goes with its paused clock.
pub(crate) fn begin() {
    BEGAN.set(Some(Instant::now()));
}

/// The time of day after `later`, as objects bear it.
pub(crate) fn time(later: SignedDuration) -> String {
    let time = Timestamp::now() + later;
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Stands in for clock_gettime(2) of the C library.
///
/// # Safety
/// As there: `time` points to room for one.
#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> i32 {
    if let Some(began) = BEGAN.get().filter(|_| clock == libc::CLOCK_REALTIME) {
        let since = began.elapsed();
        let seconds = BEGIN + i64::try_from(since.as_secs()).unwrap_or(0);
        // SAFETY: the caller says that there is room.
        unsafe {
            (*time).tv_sec = seconds;
            (*time).tv_nsec = since.subsec_nanos().into();
        }
        return 0;
    }
    // SAFETY: the arguments are the caller's.
    let done = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) };
    i32::try_from(done).unwrap_or(-1)
}
