//! The kubelet's gRPC service, played by a server that answers with given bytes.

use std::collections::HashMap;

use bytes::Bytes;
use gpustow_agent::claims::{Claims, Held, Slices, held as cards_held};
use gpustow_agent::devices::Card;
use gpustow_agent::podresources::held;
use gpustow_api::claim;
use gpustow_api::gpunode::{ClaimUse, HeldBy, Place};
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

/// Asks a server that answers every call with this body and gRPC status. Returns the held cards, each with the pod and
/// the means by which the pod holds it.
async fn ask(body: Vec<u8>, status: &'static str) -> Result<HashMap<String, String>, String> {
    ask_with(body, status, &[]).await
}

async fn ask_with(
    body: Vec<u8>,
    status: &'static str,
    slices: &[Value],
) -> Result<HashMap<String, String>, String> {
    let held = held_with(body, status, slices, &Claims::new()).await?;
    let held = held.into_iter().filter_map(|(uuid, held)| {
        let by = held.whole?;
        Some((uuid, format!("{} through {}", by.pod, by.through)))
    });
    Ok(held.collect())
}

/// As [`ask`], with the memory that claims consume.
async fn held_with(
    body: Vec<u8>,
    status: &'static str,
    slices: &[Value],
    consumed: &Claims,
) -> Result<HashMap<String, Held>, String> {
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
    Ok(cards_held(
        &answer?,
        &Slices::of(slices),
        consumed,
        &cards(),
    ))
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

/// Parts of GPUs, and devices that cannot be identified, are held whole.
#[tokio::test]
async fn claims_hold_what_their_status_says_and_whole_cards_without_it() {
    let device = |name: &str, uuid: &str, parent: Option<&str>| json!({ "name": name, "attributes": { "uuid": { "string": uuid }, "parentUUID": { "string": parent } } });
    let slices = [
        json!({ "spec": { "driver": "gpu.nvidia.com", "pool": { "name": "node-1" }, "devices": [
        device("gpu-0", "GPU-0", None), device("gpu-1", "GPU-1", None), device("part", "MIG-9", Some("GPU-2")),
    ] } }),
    ];
    let result = |device: &str, memory: Value, admin: bool| {
        json!({ "driver": "gpu.nvidia.com", "pool": "node-1", "device": device, "adminAccess": admin,
                "consumedCapacity": { "memory": memory } })
    };
    let ask = |results: Vec<Value>| {
        let held =
            ["gpu-0", "gpu-0", "gpu-1", "part"].map(|name| ("gpu.nvidia.com", name, &[][..]));
        let claim = json!({ "status": { "allocation": { "devices": { "results": results } } } });
        let name = ("team".to_owned(), "c".to_owned());
        let consumed = Claims::from([(name, claim::consumed(&claim))]);
        let (body, slices) = (claims(&held), slices.clone());
        async move { held_with(body, "0", &slices, &consumed).await.unwrap() }
    };
    let whole = || Held {
        whole: Some(HeldBy {
            pod: "team/dra".to_owned(),
            through: "claim c of gpu.nvidia.com".to_owned(),
        }),
        claims: Vec::new(),
    };
    let exact = |held_mib| Held {
        whole: None,
        claims: vec![ClaimUse {
            claim: "team/c".to_owned(),
            pod: "team/dra".to_owned(),
            held_mib,
        }],
    };
    let expect =
        |gpu_0: Option<Held>, gpu_1: Option<Held>, gpu_2: Option<Held>| -> HashMap<String, Held> {
            let all = [
                ("GPU-0", gpu_0),
                ("GPU-1", gpu_1),
                ("MIG-7", gpu_2.clone()),
                ("MIG-8", gpu_2),
            ];
            let all = all
                .into_iter()
                .filter_map(|(uuid, held)| Some((uuid.to_owned(), held?)));
            all.collect()
        };
    let some = json!("1Gi");
    let two = vec![
        result("gpu-0", some.clone(), false),
        result("gpu-0", some.clone(), false),
        result("gpu-1", json!("5Gi"), false),
        result("part", some.clone(), false),
    ];
    assert_eq!(
        ask(two).await,
        expect(Some(exact(2048)), Some(exact(5120)), Some(whole()))
    );
    let admin = vec![
        result("gpu-0", json!(null), true),
        result("gpu-1", json!("-5Gi"), false),
        result("part", json!(null), true),
    ];
    assert_eq!(ask(admin).await, expect(None, Some(whole()), None));
    assert_eq!(
        ask(vec![]).await,
        expect(Some(whole()), Some(whole()), Some(whole()))
    );
}

#[tokio::test]
async fn a_claim_that_pods_share_counts_once_and_too_many_claims_hold_the_whole_card() {
    let devices = [
        json!({ "spec": { "driver": "d", "pool": { "name": "node-1" }, "devices": [
        { "name": "gpu-0", "attributes": { "uuid": { "string": "GPU-0" } } },
    ] } }),
    ];
    let of = |claim: usize| Claim {
        name: format!("c{claim}"),
        namespace: "team".to_owned(),
        devices: vec![ClaimDevice {
            driver: "d".to_owned(),
            pool: "node-1".to_owned(),
            name: "gpu-0".to_owned(),
            ..ClaimDevice::default()
        }],
    };
    let pod = |claim: usize| Pod {
        name: format!("p{claim}"),
        namespace: "team".to_owned(),
        containers: vec![Container {
            claims: vec![of(claim)],
            ..Container::default()
        }],
    };
    let consumed = json!({ "status": { "allocation": { "devices": { "results": [
        { "driver": "d", "pool": "node-1", "device": "gpu-0", "consumedCapacity": { "memory": "1Mi" } },
    ] } } } });
    let consumed = |claim: usize| {
        (
            ("team".to_owned(), format!("c{claim}")),
            claim::consumed(&consumed),
        )
    };
    for (claims, whole) in [(256, false), (257, true)] {
        let pods = (0..claims).chain(0..claims).map(pod).collect();
        let body = framed(&List { pods }.encode_to_vec());
        let consumed = (0..claims).map(consumed).collect();
        let held = held_with(body, "0", &devices, &consumed).await.unwrap();
        let held = &held["GPU-0"];
        assert_eq!((held.whole.is_some(), held.claimed().0), (whole, 256));
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
