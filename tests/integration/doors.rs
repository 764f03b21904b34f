//! The accounts that may write the annotations about a pod's GPUs, and the doors for these writes.

use anyhow::{Result, ensure};
use gpustow_api::names;
use gpustow_testkit::{Case, ControlPlane, client};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams, Request};
use serde_json::{Value, json};

use crate::install::{installed, try_create};

const EXTENDERS: [&str; 11] = [
    names::ASSIGNMENT,
    names::EPOCH,
    names::FENCE,
    names::RESERVATION,
    "devices.gpustow.dev/main",
    "mib.gpustow.dev/main",
    "share.gpustow.dev/main",
    "mps.gpustow.dev/main",
    "nvidia.cdi.k8s.io/container.main",
    "nvidia.cdi.k8s.io/pod",
    names::CDI_DOMAIN,
];
const AGENTS: [&str; 1] = [names::CONFIRMED];

/// A way by which a pod's annotations are written.
#[derive(Clone, Copy, Debug)]
enum Door {
    Pods,
    Status,
    Binding,
    LegacyBinding,
}

const DOORS: [Door; 4] = [Door::Pods, Door::Status, Door::Binding, Door::LegacyBinding];

/// A client before a pod.
struct Writer {
    client: Client,
    namespace: String,
    pod: String,
}

impl Writer {
    /// Tries to write, without effect. Returns the API server's message if it refuses.
    async fn write(&self, door: Door, annotations: Value) -> Result<Option<String>> {
        let pods = Api::<Pod>::namespaced(self.client.clone(), &self.namespace);
        let params = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        let change = Patch::Merge(json!({"metadata": {"annotations": annotations}}));
        let answer = match door {
            Door::Pods => pods.patch(&self.pod, &params, &change).await.map(drop),
            Door::Status => pods
                .patch_status(&self.pod, &params, &change)
                .await
                .map(drop),
            Door::Binding => {
                self.bind(&format!("pods/{}/binding", self.pod), annotations)
                    .await
            }
            Door::LegacyBinding => self.bind("bindings", annotations).await,
        };
        match answer {
            Ok(()) => Ok(None),
            Err(kube::Error::Api(status)) => Ok(Some(status.message)),
            Err(error) => Err(error.into()),
        }
    }

    async fn bind(&self, resource: &str, annotations: Value) -> kube::Result<()> {
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": {"name": self.pod, "annotations": annotations},
            "target": {"kind": "Node", "name": "somewhere"},
        });
        let url = format!("/api/v1/namespaces/{}/{resource}", self.namespace);
        let params = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let request = Request::new(url).create(&params, binding.to_string().into_bytes());
        let request = request.map_err(kube::Error::BuildRequest)?;
        self.client.request::<Value>(request).await.map(drop)
    }
}

/// The ServiceAccount's client, with every permission that RBAC can give: the policies forbid all writes that still
/// fail.
async fn almighty(cluster: &ControlPlane, account: &str) -> Result<Client> {
    let accounts = Api::<ServiceAccount>::namespaced(cluster.admin()?, names::NAMESPACE);
    let mut object = ServiceAccount::default();
    object.metadata.name = Some(account.to_owned());
    let params = PatchParams::apply("test").force();
    accounts
        .patch(account, &params, &Patch::Apply(&object))
        .await?;
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": format!("almighty-{account}")},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": names::NAMESPACE}],
    });
    cluster.apply(&role.to_string()).await?;
    client(&cluster.kubeconfig(names::NAMESPACE, account, None).await?).await
}

#[tokio::test]
async fn each_key_has_its_writer_at_every_door() -> Result<()> {
    let cluster = installed().await?;
    let case = Case::new(cluster, "doors").await?;
    case.pod("p").gpu_mem(8).create(&case.client).await?;
    let writer = |client| Writer {
        client,
        namespace: case.namespace.clone(),
        pod: "p".into(),
    };
    let extender = writer(almighty(cluster, names::EXTENDER).await?);
    let agent = writer(almighty(cluster, names::AGENT).await?);
    let admin = writer(cluster.admin()?);
    for door in DOORS {
        // A policy of its own additionally limits the extender to these keys: see attack/extender.rs.
        let of_extender = match door {
            Door::Pods => &[][..],
            Door::Status => &[names::EPOCH, names::FENCE, names::RESERVATION][..],
            Door::Binding | Door::LegacyBinding => &EXTENDERS[..],
        };
        let allowed = [(&extender, of_extender), (&admin, &["example.com/own"][..])];
        for (writer, keys) in allowed {
            for key in keys {
                let answer = writer.write(door, json!({*key: "x"})).await?;
                ensure!(answer.is_none(), "{key} at {door:?}: {answer:?}");
            }
        }
        for (writer, keys) in [
            (&extender, &AGENTS[..]),
            (&admin, &EXTENDERS[..]),
            (&admin, &AGENTS[..]),
        ] {
            for key in keys {
                let answer = writer
                    .write(door, json!({*key: "x"}))
                    .await?
                    .unwrap_or_default();
                let expected = format!("metadata.annotations[{key}]: only gpustow's ");
                let refused = answer.contains(&expected) || answer.contains("the extender's");
                ensure!(refused, "{key} at {door:?}: {answer:?}");
            }
        }
        // A policy of its own additionally limits an agent to its own node: see agent_token.rs.
        for key in EXTENDERS {
            let answer = agent.write(door, json!({key: "x"})).await?;
            ensure!(
                answer.is_some(),
                "{key} at {door:?}: the agent may write it"
            );
        }
    }
    case.end().await
}

#[tokio::test]
async fn no_client_creates_a_pod_with_our_keys() -> Result<()> {
    let cluster = installed().await?;
    let admin = cluster.admin()?;
    for key in EXTENDERS.iter().chain(&AGENTS) {
        let pod = gpustow_testkit::pod("default", "p")
            .gpu_mem(1)
            .annotation(key, "x")
            .build();
        let refused = try_create(&admin, &pod).await.is_err();
        ensure!(refused, "{key}");
    }
    Ok(())
}

/// These doors do not need a guard: the API server ignores metadata there.
#[tokio::test]
async fn other_subresources_write_no_annotations() -> Result<()> {
    let cluster = installed().await?;
    let case = Case::new(cluster, "shut").await?;
    case.pod("p").gpu_mem(8).create(&case.client).await?;
    let params = PatchParams {
        dry_run: true,
        ..PatchParams::default()
    };
    let change = Patch::Merge(json!({"metadata": {"annotations": {names::ASSIGNMENT: "x"}}}));
    for door in ["resize", "ephemeralcontainers"] {
        let pod = case
            .pods()
            .patch_subresource(door, "p", &params, &change)
            .await?;
        assert_eq!(pod.metadata.annotations, None, "{door}");
    }
    case.end().await
}

/// With exactly the permissions of the manifests: the writes that the extender can do, and the writes that it cannot
/// do.
#[tokio::test]
async fn the_extender_binds_and_others_leave_its_keys_as_they_were() -> Result<()> {
    let cluster = installed().await?;
    let case = Case::new(cluster, "bound").await?;
    let pod = case.pod("p").gpu_mem(8).create(&case.client).await?;
    let kubeconfig = cluster
        .kubeconfig(names::NAMESPACE, names::SCHEDULER, None)
        .await?;
    let extender = client(&kubeconfig).await?;
    let binding = json!({
        "metadata": {
            "name": "p", "uid": pod.metadata.uid,
            "annotations": {names::ASSIGNMENT: "a", "devices.gpustow.dev/main": "GPU-1"},
        },
        "target": {"kind": "Node", "name": "somewhere"},
    });
    let ours = Api::<Pod>::namespaced(extender.clone(), &case.namespace);
    let params = PostParams::default();
    let answer: Value = ours
        .create_subresource("binding", "p", &params, &binding)
        .await?;
    assert_eq!(answer["status"], "Success");

    let writer = |client| Writer {
        client,
        namespace: case.namespace.clone(),
        pod: "p".into(),
    };
    let admin = writer(cluster.admin()?);
    for door in [Door::Pods, Door::Status] {
        for allowed in [
            json!({"example.com/own": "x"}),
            json!({names::ASSIGNMENT: "a"}),
        ] {
            assert_eq!(admin.write(door, allowed).await?, None);
        }
        for refused in [
            json!({names::ASSIGNMENT: "b"}),
            json!({"devices.gpustow.dev/main": null}),
        ] {
            let answer = admin.write(door, refused).await?.unwrap_or_default();
            ensure!(
                answer.contains("only gpustow's extender"),
                "{door:?}: {answer}"
            );
        }
    }
    let extender = writer(extender);
    assert_eq!(
        extender
            .write(Door::Status, json!({names::EPOCH: "3"}))
            .await?,
        None
    );
    let answer = extender
        .write(Door::Pods, json!({"example.com/own": "x"}))
        .await?;
    ensure!(
        answer
            .as_ref()
            .is_some_and(|answer| answer.contains("forbidden")),
        "{answer:?}"
    );
    case.end().await
}
