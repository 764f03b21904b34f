//! The kubelet's PodResources service: which devices pods were given by device plugins and by claims.

use std::path::Path;
use std::time::Duration;

use gpustow_api::claim::Device;
use gpustow_api::gpunode::HeldBy;
use gpustow_api::names;
use http::uri::PathAndQuery;
use prost::Message;
use thiserror::Error;
use tokio::time::timeout;
use tonic::Request;
use tonic::client::Grpc;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

use crate::claims::Holding;

const LIST: &str = "/v1.PodResourcesLister/List";
const TIMEOUT: Duration = Duration::from_secs(5);
/// Far more bytes than the pods of one node can fill.
const MAX_ANSWER: usize = 16 << 20;

/// The kubelet does not list the devices.
#[derive(Debug, Error)]
pub enum PodResourcesError {
    /// There is no socket.
    #[error("there is no {0}")]
    Absent(String),
    /// Its socket cannot be reached.
    #[error("{0}")]
    Socket(#[from] tonic::transport::Error),
    /// It refuses, or its reply is not a valid answer.
    #[error("{0}")]
    Answer(#[from] tonic::Status),
    /// It does not answer in time.
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
    #[prost(string, tag = "3")]
    claim_namespace: String,
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

/// The devices that pods hold.
///
/// # Errors
/// [`PodResourcesError`] if the kubelet cannot be asked.
pub async fn held(socket: &Path) -> Result<Vec<Holding>, PodResourcesError> {
    if !socket.exists() {
        return Err(PodResourcesError::Absent(socket.display().to_string()));
    }
    let answer = timeout(TIMEOUT, list(socket))
        .await
        .map_err(|_| PodResourcesError::Timeout)??;
    Ok(holdings(&answer))
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
    // The kubelet's list is not sorted.
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
            claimed: None,
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
            claimed: Some((
                (claim.claim_namespace.clone(), claim.claim_name.clone()),
                Device {
                    driver: device.driver_name.clone(),
                    pool: device.pool_name.clone(),
                    name: device.device_name.clone(),
                },
            )),
        }
    })
}

/// One gRPC call without arguments.
async fn list(socket: &Path) -> Result<ListPodResourcesResponse, PodResourcesError> {
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
    let channel = endpoint.connect().await?;
    let mut client = Grpc::new(channel).max_decoding_message_size(MAX_ANSWER);
    client.ready().await?;
    let path = PathAndQuery::from_static(LIST);
    let codec = ProstCodec::<(), ListPodResourcesResponse>::default();
    let answer = client.unary(Request::new(()), path, codec).await?;
    Ok(answer.into_inner())
}
