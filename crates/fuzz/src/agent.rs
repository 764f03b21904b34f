//! The inputs of a node's agent.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use gpustow_agent::clock::Now;
use gpustow_agent::devices::Reading;
use gpustow_agent::limits::Means;
use gpustow_agent::pods::NodePods;
use gpustow_agent::processes::Who;
use gpustow_agent::state::{Settings, State};
use gpustow_agent::{cgroup, podresources};
use gpustow_api::GpuNode;
use gpustow_api::gpunode::GpuNodeSpec;
use gpustow_pack::Mib;
use k8s_openapi::jiff::Timestamp;
use tokio::net::UnixListener;

use crate::extender;

/// The text of `/proc/PID/cgroup`.
pub(crate) fn cgroup(data: &[u8]) {
    if let Some(owner) = cgroup::owner(&String::from_utf8_lossy(data)) {
        assert!(
            !owner.pod.is_empty() && !owner.pod.contains('/'),
            "{owner:?}"
        );
        assert!(owner.container.is_none_or(|id| !id.is_empty()));
    }
}

/// The kubelet's answer about devices.
pub(crate) fn kubelet(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let (Ok(runtime), Ok(dir)) = (runtime, tempfile::tempdir()) else {
        return;
    };
    // None if the machine is at its bounds.
    let _ = runtime.block_on(ask(data.to_vec(), &dir.path().join("kubelet.sock")));
}

async fn ask(body: Vec<u8>, socket: &Path) -> Option<()> {
    let listener = UnixListener::bind(socket).ok()?;
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.ok()?;
        let mut connection = h2::server::handshake(stream).await.ok()?;
        while let Some(Ok((_, mut respond))) = connection.accept().await {
            let length = u32::try_from(body.len()).ok()?.to_be_bytes();
            let framed = [&[0][..], &length, &body].concat();
            let mut stream = respond.send_response(http::Response::new(()), false).ok()?;
            stream.send_data(Bytes::from(framed), false).ok()?;
            let mut trailers = http::HeaderMap::new();
            trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
            stream.send_trailers(trailers).ok()?;
        }
        Some(())
    });
    let _ = podresources::held(socket).await;
    Some(())
}

/// NVML's answers about a machine, as `--once` prints them. The agent's tests have properties of their own for the step
/// from the library's answers to readings.
pub(crate) fn nvml(data: &[u8]) {
    let Ok(reading) = serde_json::from_slice::<Reading>(data) else {
        return;
    };
    let now = |second: u64| Now {
        age: Duration::from_secs(second),
        wall: Timestamp::UNIX_EPOCH,
    };
    let settings = Settings {
        headroom: Mib(500),
        unified_memory: None,
        threshold: Mib(256),
        application_xids: [13].into(),
        probation: Duration::from_secs(600),
        forget_after: Duration::from_secs(60),
        mps: true,
        means: Means {
            toolkit: true,
            agent: true,
            cgroup2: true,
        },
    };
    let mut state = State::new(settings, None, now(0));
    for second in 0..2 {
        let pods = NodePods::default();
        state.read(
            Ok(&reading),
            &pods,
            &HashMap::new(),
            |_| Who::Host,
            now(second),
        );
        let mut report = GpuNode::new("a", GpuNodeSpec::default());
        report.status = Some(state.status(&pods));
        if let Ok(text) = serde_json::to_vec(&report) {
            extender::report(&text);
        }
    }
}
