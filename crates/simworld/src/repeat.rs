//! Randomness and time of day of a simulated world: both follow its seed and its paused clock, so that the world repeats.
//!
//! The standard library's maps and tokio's `select!` order by random numbers of the C library, and kube's pauses by
//! fastrand. Objects carry the time of day in whole seconds: two pods are of one age or not, depending on the fraction of a
//! second at which the world begins.
//!
//! Both functions change the calling thread alone. Threads that call neither get the machine's values.

use std::cell::Cell;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

thread_local! {
    static RANDOM: Cell<Option<u64>> = const { Cell::new(None) };
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Takes this thread's random numbers from the seed from now on. Maps that the thread has made before keep their order.
pub fn seed(seed: u64) {
    RANDOM.set(Some(seed));
    fastrand::seed(seed);
}

/// From now on this thread's time of day follows the clock of its runtime. It begins at one fixed second.
pub fn start_time() {
    BEGAN.set(Some(Instant::now()));
}

/// The time of day after `later`, as objects carry it.
#[must_use]
pub fn time(later: SignedDuration) -> String {
    let time = Timestamp::now() + later;
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Functions of the C library, replaced in every program that links this crate.
#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "they have the C library's interface")]
mod replaced {
    use nix::libc;

    use super::{BEGAN, RANDOM};

    /// The time of day at which worlds begin: that of 2026-01-01 in seconds since 1970.
    const BEGIN: i64 = 1_767_225_600;

    /// Replaces getrandom(2).
    ///
    /// # Safety
    /// As there: `buffer` has room for `length` bytes.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn getrandom(buffer: *mut u8, length: usize, flags: u32) -> isize {
        let Some(mut state) = RANDOM.get() else {
            // SAFETY: the arguments are the caller's.
            let done = unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, flags) };
            return isize::try_from(done).unwrap_or(-1);
        };
        for at in 0..length {
            // SplitMix64.
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let byte = (mixed >> 32).to_le_bytes()[0];
            // SAFETY: the caller provides room for `length` bytes.
            unsafe { buffer.add(at).write(byte) };
        }
        RANDOM.set(Some(state));
        length.cast_signed()
    }

    /// Replaces clock_gettime(2).
    ///
    /// # Safety
    /// As there: `time` points to room for one.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> i32 {
        if let Some(began) = BEGAN.get().filter(|_| clock == libc::CLOCK_REALTIME) {
            let since = began.elapsed();
            let seconds = BEGIN + i64::try_from(since.as_secs()).unwrap_or(0);
            // SAFETY: the caller provides room for one time.
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
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasher as _, RandomState};
    use std::thread;
    use std::time::Duration;

    use super::*;

    fn drawn(with: Option<u64>) -> u64 {
        let drawn = thread::spawn(move || {
            with.inspect(|it| seed(*it));
            RandomState::new().hash_one(0)
        });
        drawn.join().unwrap()
    }

    #[test]
    fn randomness_of_a_thread_follows_its_seed() {
        assert_eq!(drawn(Some(7)), drawn(Some(7)));
        assert_ne!(drawn(Some(7)), drawn(Some(8)));
        assert_ne!(drawn(None), drawn(None));
    }

    #[tokio::test(start_paused = true)]
    async fn time_of_day_follows_the_paused_clock() {
        let day = |time: Timestamp| time.to_string();
        assert_ne!(&time(SignedDuration::ZERO)[..10], "2026-01-01");
        start_time();
        assert_eq!(day(Timestamp::now()), "2026-01-01T00:00:00Z");
        tokio::time::advance(Duration::from_millis(1500)).await;
        assert_eq!(day(Timestamp::now()), "2026-01-01T00:00:01.5Z");
        assert_eq!(time(SignedDuration::from_secs(2)), "2026-01-01T00:00:03Z");
    }
}
