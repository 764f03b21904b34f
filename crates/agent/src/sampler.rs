//! The thread that asks the driver: a call that hangs keeps nothing else from working.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::devices::{DeviceError, Devices, Fault, Reading};

/// The latest word of the driver.
#[derive(Debug)]
pub struct Sample {
    /// The driver's reading, or the reason why there is none.
    pub reading: Result<Reading, DeviceError>,
    /// How long the look took.
    pub took: Duration,
    /// When it was over.
    pub at: Instant,
}

#[derive(Debug, Default)]
struct Latest {
    sample: Option<Sample>,
    faults: Vec<Fault>,
}

/// Where samples lie until they are fetched. Faults are never overwritten.
#[derive(Debug, Default)]
pub struct Sampler {
    latest: Mutex<Latest>,
    changed: Notify,
    stopped: AtomicBool,
}

impl Sampler {
    /// Starts looking every `period`.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(devices: Box<dyn Devices>, period: Duration) -> std::io::Result<Arc<Self>> {
        let sampler = Arc::new(Self::default());
        let worker = sampler.clone();
        std::thread::Builder::new()
            .name("sampler".to_owned())
            .spawn(move || worker.run(devices, period))?;
        Ok(sampler)
    }

    /// Waits for the next sample.
    pub async fn next(&self) -> Sample {
        loop {
            if let Some(sample) = self.take() {
                return sample;
            }
            self.changed.notified().await;
        }
    }

    /// Ends the thread after its next look.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn latest(&self) -> MutexGuard<'_, Latest> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<Sample> {
        let mut latest = self.latest();
        let mut sample = latest.sample.take()?;
        if let Ok(reading) = &mut sample.reading {
            reading.faults = std::mem::take(&mut latest.faults);
        }
        Some(sample)
    }

    fn run(&self, mut devices: Box<dyn Devices>, period: Duration) {
        let mut began = Instant::now();
        while !self.stopped.load(Ordering::Relaxed) {
            let ended = devices.watch(&mut |reading| {
                self.put(Ok(reading), began.elapsed());
                std::thread::sleep(period.saturating_sub(began.elapsed()));
                began = Instant::now();
                if self.stopped.load(Ordering::Relaxed) {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            });
            if let Err(error) = ended {
                self.put(Err(error), began.elapsed());
            }
            std::thread::sleep(period);
            began = Instant::now();
        }
    }

    /// Takes the result of a look that took so long, in place of the one before it.
    pub fn put(&self, mut reading: Result<Reading, DeviceError>, took: Duration) {
        let mut latest = self.latest();
        if let Ok(reading) = &mut reading {
            latest.faults.append(&mut reading.faults);
        }
        latest.sample = Some(Sample {
            reading,
            took,
            at: Instant::now(),
        });
        drop(latest);
        self.changed.notify_one();
    }
}
