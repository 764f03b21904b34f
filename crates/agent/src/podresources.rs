//! The kubelet's PodResources service: which devices pods were given by device plugins and by claims.

use std::path::Path;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use gpustow_api::gpunode::HeldBy;
use gpustow_api::names;
use prost::Message;
use thiserror::Error;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::claims::{Device, Holding};

const LIST: &str = "http://localhost/v1.PodResourcesLister/List";
const TIMEOUT: Duration = Duration::from_secs(5);
/// Far above what the pods of one node can fill.
const MAX_ANSWER: usize = 16 << 20;

/// The kubelet does not say.
#[derive(Debug, Error)]
pub enum PodResourcesError {
    /// Its socket cannot be reached.
    #[error("{0}")]
    Socket(#[from] std::io::Error),
    /// It does not speak as it should.
    #[error("{0}")]
    Http(#[from] h2::Error),
    /// Its answer is too long or cut off.
    #[error("its answer is not a gRPC message")]
    Frame,
    /// Its answer is not what was asked for.
    #[error("{0}")]
    Message(#[from] prost::DecodeError),
    /// It says no.
    #[error("gRPC status {0}")]
    Status(String),
    /// It says nothing.
    #[error("no answer")]
    Timeout,
}

// The fields used of k8s.io/kubelet/pkg/apis/podresources/v1/api.proto.
#[derive(Clone, PartialEq, Message)]
struct ListPodResourcesResponse {
    #[prost(message, repeated, tag = "1")]
    pod_resources: Vec<PodResources>,
}

#[derive(Clone, PartialEq, Message)]
struct PodResources {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(message, repeated, tag = "3")]
    containers: Vec<ContainerResources>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerResources {
    #[prost(message, repeated, tag = "2")]
    devices: Vec<ContainerDevices>,
    #[prost(message, repeated, tag = "5")]
    dynamic_resources: Vec<DynamicResource>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerDevices {
    #[prost(string, tag = "1")]
    resource_name: String,
    #[prost(string, repeated, tag = "2")]
    device_ids: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct DynamicResource {
    #[prost(string, tag = "2")]
    claim_name: String,
    #[prost(message, repeated, tag = "4")]
    claim_resources: Vec<ClaimResource>,
}

#[derive(Clone, PartialEq, Message)]
struct ClaimResource {
    #[prost(message, repeated, tag = "1")]
    cdi_devices: Vec<CdiDevice>,
    #[prost(string, tag = "2")]
    driver_name: String,
    #[prost(string, tag = "3")]
    pool_name: String,
    #[prost(string, tag = "4")]
    device_name: String,
}

#[derive(Clone, PartialEq, Message)]
struct CdiDevice {
    #[prost(string, tag = "1")]
    name: String,
}

/// What pods hold.
///
/// # Errors
/// [`PodResourcesError`] if the kubelet cannot be asked.
pub async fn held(socket: &Path) -> Result<Vec<Holding>, PodResourcesError> {
    let answer = timeout(TIMEOUT, list(socket))
        .await
        .map_err(|_| PodResourcesError::Timeout)??;
    Ok(holdings(&ListPodResourcesResponse::decode(answer)?))
}

fn holdings(answer: &ListPodResourcesResponse) -> Vec<Holding> {
    let mut all = Vec::new();
    for pod in &answer.pod_resources {
        let by = |through: String| HeldBy {
            pod: format!("{}/{}", pod.namespace, pod.name),
            through,
        };
        for container in &pod.containers {
            let devices = container.devices.iter();
            all.extend(devices.flat_map(|devices| of_plugin(devices, by)));
            let claims = container.dynamic_resources.iter();
            all.extend(claims.flat_map(|claim| of_claim(claim, by)));
        }
    }
    // The kubelet has no order.
    all.sort_by(|one, other| (&one.by.pod, &one.uuids).cmp(&(&other.by.pod, &other.uuids)));
    all
}

/// `nvidia.com/gpu`, `nvidia.com/gpu.shared`, `nvidia.com/mig-1g.10gb`.
fn of_plugin(
    devices: &ContainerDevices,
    by: impl Fn(String) -> HeldBy,
) -> impl Iterator<Item = Holding> {
    let vendor = names::NVIDIA_GPU
        .split_inclusive('/')
        .next()
        .unwrap_or_default();
    let ids = devices.device_ids.iter();
    ids.filter(move |_| devices.resource_name.starts_with(vendor))
        .map(move |id| Holding {
            by: by(devices.resource_name.clone()),
            // Time slicing appends the slice's number.
            uuids: vec![
                id.split_once("::")
                    .map_or(id.as_str(), |(uuid, _)| uuid)
                    .to_owned(),
            ],
            device: None,
        })
}

fn of_claim(
    claim: &DynamicResource,
    by: impl Fn(String) -> HeldBy,
) -> impl Iterator<Item = Holding> {
    claim.claim_resources.iter().map(move |device| {
        // `nvidia.com/gpu=GPU-…` of some drivers.
        let uuid = |cdi: &CdiDevice| Some(cdi.name.split_once('=')?.1.to_owned());
        Holding {
            by: by(format!(
                "claim {} of {}",
                claim.claim_name, device.driver_name
            )),
            uuids: device.cdi_devices.iter().filter_map(uuid).collect(),
            device: Some(Device {
                driver: device.driver_name.clone(),
                pool: device.pool_name.clone(),
                name: device.device_name.clone(),
            }),
        }
    })
}

/// One gRPC call without arguments; the message of its answer.
async fn list(socket: &Path) -> Result<Bytes, PodResourcesError> {
    let (client, connection) = h2::client::handshake(UnixStream::connect(socket).await?).await?;
    let connection = tokio::spawn(connection);
    let request = http::Request::post(LIST)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .map_err(|_| PodResourcesError::Frame)?;
    let mut client = client.ready().await?;
    let (answer, mut stream) = client.send_request(request, false)?;
    // Not compressed, length zero: the request has no fields.
    stream.send_data(Bytes::from_static(&[0; 5]), true)?;
    let answer = answer.await?;
    // An answer without a message has its status there.
    let headers = answer.headers().clone();
    let mut body = answer.into_body();
    let mut frame = BytesMut::new();
    while let Some(data) = body.data().await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        if frame.len() + data.len() > MAX_ANSWER {
            return Err(PodResourcesError::Frame);
        }
        frame.put(data);
    }
    let trailers = body.trailers().await?.unwrap_or(headers);
    connection.abort();
    let status = trailers
        .get("grpc-status")
        .map_or(&b""[..], |status| status.as_bytes());
    match String::from_utf8_lossy(status) {
        status if status == "0" => message(frame.freeze()).ok_or(PodResourcesError::Frame),
        status => Err(PodResourcesError::Status(status.into_owned())),
    }
}

/// Without the prefix: one byte that says whether it is compressed, four for its length.
fn message(frame: Bytes) -> Option<Bytes> {
    let length: [u8; 4] = frame.get(1..5)?.try_into().ok()?;
    let is_whole =
        frame[0] == 0 && usize::try_from(u32::from_be_bytes(length)).ok()? == frame.len() - 5;
    is_whole.then(|| frame.slice(5..))
}
