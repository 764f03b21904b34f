//! The kubelet's gRPC service, played by a server that answers with given bytes.

use std::collections::HashMap;

use bytes::Bytes;
use gpustow_agent::podresources::held;
use http::{HeaderMap, Response};
use prost::Message;
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
}

#[derive(Clone, PartialEq, Message)]
struct Devices {
    #[prost(string, tag = "1")]
    resource: String,
    #[prost(string, repeated, tag = "2")]
    ids: Vec<String>,
}

/// Asks a server that answers every call with this body and gRPC status.
async fn ask(body: Vec<u8>, status: &'static str) -> Result<HashMap<String, String>, String> {
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
    answer
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
            pod("other", vec![devices("example.com/gpu", &["GPU-2"])]),
        ],
    };
    let expected = [
        ("GPU-0", "team/whole"),
        ("GPU-1", "team/slices"),
        ("MIG-7", "team/part"),
    ];
    let expected = expected
        .map(|(uuid, pod)| (uuid.to_owned(), pod.to_owned()))
        .into();
    assert_eq!(ask(framed(&list.encode_to_vec()), "0").await, Ok(expected));
}

#[tokio::test]
async fn an_answer_of_many_frames_is_put_together() {
    let devices = |number: u32| Devices {
        resource: "nvidia.com/gpu".to_owned(),
        ids: vec![format!("GPU-{number}")],
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
        Ok(2000)
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
    assert!(ask(framed(&[]), "12").await.unwrap_err().contains("12"));
    assert_eq!(ask(framed(&[]), "0").await, Ok(HashMap::new()));
    let nowhere = held(std::path::Path::new("/nonexistent/kubelet.sock")).await;
    assert!(nowhere.is_err());
}
