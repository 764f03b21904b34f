//! The thread that asks the driver, on a library that comes, goes and fails under it.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use fake_nvml::{Gpu, Machine};
use gpustow_agent::devices::{DeviceError, Devices, Fault, FaultKind, NvmlDevices, Reading};
use gpustow_agent::sampler::Sampler;

use crate::support::{Host, h100, machine};

/// Bound on an event that comes with one of the next samples.
const SOON: Duration = Duration::from_secs(30);
const PERIOD: Duration = Duration::from_millis(5);

fn follow(dir: PathBuf) -> Arc<Sampler> {
    let devices = NvmlDevices::new(vec![dir], 4 * PERIOD, Arc::default());
    Sampler::start(Box::new(devices), PERIOD).unwrap()
}

/// The first sample that `is` accepts. It panics with the last sample if none is accepted.
async fn sees(sampler: &Sampler, is: impl Fn(&Result<Reading, DeviceError>) -> bool) -> Reading {
    let mut last = None;
    let seen = tokio::time::timeout(SOON, async {
        loop {
            let reading = sampler.next().await.reading;
            if is(&reading) {
                return reading;
            }
            last = Some(reading);
        }
    });
    let seen = seen.await;
    seen.unwrap_or_else(|_| panic!("last seen: {last:?}"))
        .unwrap_or_default()
}

fn fails(reason: &'static str) -> impl Fn(&Result<Reading, DeviceError>) -> bool {
    move |reading| matches!(reading, Err(error) if error.reason() == reason)
}

fn shows(cards: usize) -> impl Fn(&Result<Reading, DeviceError>) -> bool {
    move |reading| {
        let well = |reading: &Reading| reading.cards.iter().all(|card| card.failure.is_none());
        matches!(reading, Ok(reading) if reading.cards.len() == cards && well(reading))
    }
}

#[tokio::test]
async fn a_library_that_comes_late_is_found() {
    let host = Host::new(&machine(vec![h100(0)]));
    let (library, aside) = (host.shared_object(), host.dir.path().join("aside"));
    std::fs::rename(&library, &aside).unwrap();
    // Nor is the system's own looked for, if there is one.
    std::fs::write(&library, "not a library").unwrap();
    let sampler = follow(host.dir.path().into());
    sees(&sampler, fails("LibraryMissing")).await;
    std::fs::rename(&aside, &library).unwrap();
    sees(&sampler, shows(1)).await;
    sampler.stop();
}

#[tokio::test]
async fn a_driver_that_is_reloaded_is_followed() {
    let host = Host::new(&machine(vec![h100(0)]));
    let sampler = follow(host.dir.path().into());
    sees(&sampler, shows(1)).await;
    for error in [9, 18, 9] {
        host.shows(&Machine {
            error,
            ..machine(vec![h100(0)])
        });
        let reason = if error == 9 {
            "DriverNotLoaded"
        } else {
            "DriverFailed"
        };
        sees(&sampler, fails(reason)).await;
    }
    let driver = "590.1".to_owned();
    host.shows(&Machine {
        driver,
        ..machine(vec![h100(0), h100(1)])
    });
    let reading = sees(&sampler, shows(2)).await;
    assert_eq!(reading.driver.as_deref(), Some("590.1"));
    sampler.stop();
}

#[tokio::test]
async fn a_card_that_was_lost_and_is_reset_returns() {
    let host = Host::new(&machine(vec![h100(0), h100(1)]));
    let sampler = follow(host.dir.path().into());
    sees(&sampler, shows(2)).await;
    let error = 15;
    host.shows(&machine(vec![Gpu { error, ..h100(0) }, h100(1)]));
    // The card is reported as lost until the library is opened again, which then does not show it at all.
    sees(&sampler, shows(1)).await;
    host.shows(&machine(vec![h100(0), h100(1)]));
    sees(&sampler, shows(2)).await;
    sampler.stop();
}

/// Three looks of which the first two show a fault, then none.
struct Scripted {
    done: Sender<()>,
    resumed: Receiver<()>,
}

impl Devices for Scripted {
    fn watch(
        &mut self,
        each: &mut dyn FnMut(Reading) -> ControlFlow<()>,
    ) -> Result<(), DeviceError> {
        for xid in [Some(31), Some(79), None] {
            let fault = |xid| Fault {
                uuid: "GPU-0".to_owned(),
                kind: FaultKind::Xid(xid),
            };
            let _ = each(Reading {
                faults: xid.map(fault).into_iter().collect(),
                ..Reading::default()
            });
        }
        let _ = (self.done.send(()), self.resumed.recv());
        Ok(())
    }
}

#[tokio::test]
async fn a_look_that_was_never_fetched_gives_its_faults_to_the_next() {
    let ((done, looked), (resume, resumed)) = (channel(), channel());
    let sampler = Sampler::start(Box::new(Scripted { done, resumed }), PERIOD).unwrap();
    looked.recv().unwrap();
    let faults = sampler.next().await.reading.unwrap().faults;
    let kinds: Vec<_> = faults.iter().map(|fault| fault.kind).collect();
    assert_eq!(kinds, [FaultKind::Xid(31), FaultKind::Xid(79)]);
    sampler.stop();
    resume.send(()).unwrap();
}
