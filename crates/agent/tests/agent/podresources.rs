//! The kubelet's gRPC service, played by a server that answers with given bytes.

use std::collections::HashMap;

use bytes::Bytes;
use gpustow_agent::claims::{Slices, held as cards_held};
use gpustow_agent::devices::Card;
use gpustow_agent::podresources::held;
use gpustow_api::gpunode::Place;
use http::{HeaderMap, Response};
use prost::Message;
use serde_json::{Value, json};
use tokio::net::UnixListener;

#[derive(Clone, PartialEq, Message)]
struct List {
    #[prost(message, repeated, tag = "1")]
    pods: Vec<Pod>,
}

#[derive(Clone, PartialEq, Message)]
struct Pod {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(message, repeated, tag = "3")]
    containers: Vec<Container>,
}

#[derive(Clone, PartialEq, Message)]
struct Container {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "2")]
    devices: Vec<Devices>,
    #[prost(int64, repeated, tag = "3")]
    cpu_ids: Vec<i64>,
    #[prost(message, repeated, tag = "5")]
    claims: Vec<Claim>,
}

#[derive(Clone, PartialEq, Message)]
struct Claim {
    #[prost(string, tag = "2")]
    name: String,
    #[prost(string, tag = "3")]
    namespace: String,
    #[prost(message, repeated, tag = "4")]
    devices: Vec<ClaimDevice>,
}

#[derive(Clone, PartialEq, Message)]
struct ClaimDevice {
    #[prost(message, repeated, tag = "1")]
    cdi: Vec<Cdi>,
    #[prost(string, tag = "2")]
    driver: String,
    #[prost(string, tag = "3")]
    pool: String,
    #[prost(string, tag = "4")]
    name: String,
    #[prost(string, optional, tag = "5")]
    share: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Cdi {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct Devices {
    #[prost(string, tag = "1")]
    resource: String,
    #[prost(string, repeated, tag = "2")]
    ids: Vec<String>,
}

/// Four cards of the node; the last two are parts of one that is divided.
fn cards() -> [Card; 4] {
    [
        ("GPU-0", None),
        ("GPU-1", None),
        ("MIG-7", Some("GPU-2")),
        ("MIG-8", Some("GPU-2")),
    ]
    .map(|(uuid, parent)| Card {
        uuid: uuid.to_owned(),
        place: Place {
            parent: parent.map(str::to_owned),
            ..Place::default()
        },
        ..Card::default()
    })
}

/// Asks a server that answers every call with this body and gRPC status: which cards are held, by
/// which pod and through what.
async fn ask(body: Vec<u8>, status: &'static str) -> Result<HashMap<String, String>, String> {
    ask_with(body, status, &[]).await
}

async fn ask_with(
    body: Vec<u8>,
    status: &'static str,
    slices: &[Value],
) -> Result<HashMap<String, String>, String> {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("kubelet.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            assert_eq!(request.uri().path(), "/v1.PodResourcesLister/List");
            let mut stream = respond.send_response(Response::new(()), false).unwrap();
            stream.send_data(Bytes::from(body.clone()), false).unwrap();
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", http::HeaderValue::from_static(status));
            stream.send_trailers(trailers).unwrap();
        }
    });
    let answer = held(&socket).await.map_err(|error| error.to_string());
    server.abort();
    let held = cards_held(&answer?, &Slices::of(slices), &cards());
    let held = held.into_iter();
    Ok(held
        .map(|(uuid, by)| (uuid, format!("{} through {}", by.pod, by.through)))
        .collect())
}

fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[0][..], &length, message].concat()
}

#[tokio::test]
async fn cards_of_nvidias_plugin_are_found_and_others_are_not() {
    let devices = |resource: &str, ids: &[&str]| Devices {
        resource: resource.to_owned(),
        ids: ids.iter().map(|&id| id.to_owned()).collect(),
    };
    let pod = |name: &str, devices: Vec<Devices>| Pod {
        name: name.to_owned(),
        namespace: "team".to_owned(),
        containers: vec![Container {
            name: "c".to_owned(),
            devices,
            cpu_ids: vec![1, 2, 300],
            claims: Vec::new(),
        }],
    };
    let list = List {
        pods: vec![
            pod("whole", vec![devices("nvidia.com/gpu", &["GPU-0"])]),
            pod(
                "slices",
                vec![devices("nvidia.com/gpu.shared", &["GPU-1::0", "GPU-1::3"])],
            ),
            pod("part", vec![devices("nvidia.com/mig-1g.10gb", &["MIG-7"])]),
            pod("other", vec![devices("example.com/gpu", &["MIG-8"])]),
        ],
    };
    let expected = [
        ("GPU-0", "team/whole through nvidia.com/gpu"),
        ("GPU-1", "team/slices through nvidia.com/gpu.shared"),
        ("MIG-7", "team/part through nvidia.com/mig-1g.10gb"),
    ];
    let expected = expected
        .map(|(uuid, pod)| (uuid.to_owned(), pod.to_owned()))
        .into();
    assert_eq!(ask(framed(&list.encode_to_vec()), "0").await, Ok(expected));
}

/// A pod that holds these devices by a claim.
fn claims(devices: &[(&str, &str, &[&str])]) -> Vec<u8> {
    let device = |&(driver, name, cdi): &(&str, &str, &[&str])| ClaimDevice {
        driver: driver.to_owned(),
        pool: "node-1".to_owned(),
        name: name.to_owned(),
        cdi: cdi
            .iter()
            .map(|&name| Cdi {
                name: name.to_owned(),
            })
            .collect(),
        share: Some("s".to_owned()),
    };
    let claim = Claim {
        name: "c".to_owned(),
        namespace: "team".to_owned(),
        devices: devices.iter().map(device).collect(),
    };
    let pod = Pod {
        name: "dra".to_owned(),
        namespace: "team".to_owned(),
        containers: vec![Container {
            claims: vec![claim],
            ..Container::default()
        }],
    };
    framed(&List { pods: vec![pod] }.encode_to_vec())
}

#[tokio::test]
async fn cards_of_claims_are_found_by_what_their_drivers_publish() {
    let device = |name: &str, attributes: Value| json!({ "name": name, "attributes": attributes });
    let slice = |driver: &str, devices: Value| json!({ "spec": { "driver": driver, "pool": { "name": "node-1" }, "devices": devices } });
    let uuid = |uuid: &str| json!({ "uuid": { "string": uuid }, "type": { "string": "gpu" } });
    let part = json!({ "uuid": { "string": "MIG-8" }, "parentUUID": { "string": "GPU-2" } });
    let planned = json!({ "parentUUID": { "string": "GPU-2" }, "productName": { "int": 7 } });
    let nvidia = slice(
        "gpu.nvidia.com",
        json!([
            device("gpu-0", uuid("GPU-0")),
            device("gpu-2-mig-8", part),
            device("gpu-2-mig-9", planned),
            device("gpu-1", uuid("GPU-1")),
        ]),
    );
    let others = slice(
        "shares.example.com",
        json!([device("any", uuid("GPU-1")), { "name": "nic" }]),
    );
    let slices = [nvidia, others];
    let cases: [(&str, &str, &[&str]); 7] = [
        ("gpu.nvidia.com", "gpu-0", &["GPU-0"]),
        ("gpu.nvidia.com", "gpu-1", &["GPU-1"]),
        ("gpu.nvidia.com", "gpu-2-mig-8", &["MIG-8"]),
        ("gpu.nvidia.com", "gpu-2-mig-9", &["MIG-7", "MIG-8"]),
        ("shares.example.com", "any", &["GPU-1"]),
        ("shares.example.com", "nic", &[]),
        (
            "gpu.nvidia.com",
            "unknown",
            &["GPU-0", "GPU-1", "MIG-7", "MIG-8"],
        ),
    ];
    for (driver, name, expected) in cases {
        let body = claims(&[(driver, name, &["k8s.gpu.nvidia.com/claim=1-gpu-0"])]);
        let held = ask_with(body, "0", &slices).await.unwrap();
        let through = format!("team/dra through claim c of {driver}");
        let expected = expected
            .iter()
            .map(|&uuid| (uuid.to_owned(), through.clone()));
        assert_eq!(held, expected.collect(), "{driver}/{name}");
    }
}

#[tokio::test]
async fn cards_of_claims_are_found_by_their_cdi_name() {
    let body = claims(&[("gpu.nvidia.com", "gpu-7", &["nvidia.com/gpu=GPU-1"])]);
    let held = ask(body, "0").await.unwrap();
    assert_eq!(held.keys().collect::<Vec<_>>(), ["GPU-1"]);
}

#[tokio::test]
async fn an_answer_of_many_frames_is_put_together() {
    let devices = |number: u32| Devices {
        resource: "nvidia.com/gpu".to_owned(),
        ids: vec![if number == 1999 { "GPU-1" } else { "GPU-9" }.to_owned()],
    };
    let pod = |number: u32| Pod {
        name: "p".repeat(200),
        containers: vec![Container {
            devices: vec![devices(number)],
            ..Container::default()
        }],
        ..Pod::default()
    };
    let list = List {
        pods: (0..2000).map(pod).collect(),
    };
    assert_eq!(
        ask(framed(&list.encode_to_vec()), "0")
            .await
            .map(|held| held.len()),
        Ok(1)
    );
}

#[tokio::test]
async fn nonsense_is_an_error_and_nothing_worse() {
    for body in [
        vec![],
        vec![0; 3],
        vec![0, 0, 0, 0, 9, 1],
        vec![1, 0, 0, 0, 0],
        framed(&[255; 40]),
    ] {
        assert!(ask(body.clone(), "0").await.is_err(), "{body:?}");
    }
    let refused = ask(framed(&[]), "12").await.unwrap_err();
    assert!(refused.contains("not implemented"), "{refused}");
    assert_eq!(ask(framed(&[]), "0").await, Ok(HashMap::new()));
    let nowhere = held(std::path::Path::new("/nonexistent/kubelet.sock")).await;
    assert!(nowhere.is_err());
}
